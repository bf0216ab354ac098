"""``titan ft lighthouse``."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "titan_core", "ft", "lighthouse", "--bind"]


@pytest.mark.full
def test_it_serves_until_it_is_stopped() -> None:
    with subprocess.Popen([*COMMAND, "127.0.0.1:0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("lighthouse at http://")
        socket.create_connection(("127.0.0.1", int(line.rpartition(":")[2]))).close()
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.full
def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = subprocess.run([*COMMAND, address], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    (line,) = [line for line in found.stderr.splitlines() if "error" in line]
    assert f"--bind {address}: cannot listen there" in line and "choose another port" in line
