"""Wait until the first pod of a job listens: its image may still be loading. Arguments: its host name and port."""

import socket
import sys
import time

host, port = sys.argv[1], int(sys.argv[2])
while socket.gethostname() != host.partition(".")[0]:
    try:
        socket.create_connection((host, port), timeout=5).close()
        break
    except OSError as error:
        print(f"waiting for {host}:{port}: {error}", flush=True)
        time.sleep(1)
