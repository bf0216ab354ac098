"""An HTTP server on loopback that records what it receives, and answers as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]
"""Status, and what is sent as JSON."""


@dataclass
class Received:
    """What the server has received so far."""

    url: str
    requests: list[tuple[str, str, Any, dict[str, str]]] = field(default_factory=list)
    """Method, path, JSON body (``None`` if there is none) and headers, whose names are in lower case."""

    @property
    def bodies(self) -> list[Any]:
        """The bodies in order."""
        return [body for _, _, body, _ in self.requests]


@contextmanager
def serving(answer: Callable[[str, Any], Answer | None] = lambda path, body: (200, {})) -> Iterator[Received]:
    """Serve on a free port of loopback.

    Args:
        answer: returns the answer to a path and a body; ``None``: the server hangs until the end of the context.
    """
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            received.requests.append((self.command, self.path, body, {k.lower(): v for k, v in self.headers.items()}))
            answered = answer(self.path, body)
            if answered is None:
                over.wait()
                return
            status, value = answered
            text = json.dumps(value).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    received = Received(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield received
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()
