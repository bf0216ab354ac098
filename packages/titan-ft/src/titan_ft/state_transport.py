"""Sends the state of a replica group to a group that joins, by HTTP.

torchft's own ``HTTPTransport`` unpickles whatever the peer sends, and serves the tensors of the training under a lock: a
slow receiver makes the sender's next update wait, and then fail. This one reads tensors and plain values alone, and serves
a copy.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from titan_core.toolkit.listening import bound_socket
from titan_ft.torchft_api import CheckpointTransport, read_state, write_state

_PATH = "/checkpoint/"
_PIECE = 2**20
"""Most bytes between two looks at the clock."""


class StateTransport(CheckpointTransport[dict[str, Any]]):  # type: ignore[misc]  # torchft is untyped
    """One rank's server and client."""

    def __init__(self, host: str, address: str, timeout: timedelta) -> None:
        """
        Args:
            host: name or address of this machine, as peers reach it.
            address: on which the server listens; ``""`` for all.
            timeout: longest time for one transfer.
        """
        self._host, self._seconds = host, timeout.total_seconds()
        self._changed = threading.Condition()
        self._offered: tuple[int, dict[str, Any]] | None = None
        self._is_over = False
        self._server = _Server(address, self._serve, self._seconds)
        self._thread = threading.Thread(target=self._server.serve_forever, name="titan-ft state", daemon=True)
        self._thread.start()

    def metadata(self) -> str:
        """Return the address of this rank's state, without the step."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}{_PATH}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta) -> None:
        """Offer a copy of ``state_dict``, until :meth:`disallow_checkpoint`, to anyone who asks for ``step``.

        The copy is complete when this returns. Nothing changes the state meanwhile: the manager forms quorums synchronously,
        so that the thread that trains waits for this one.
        """
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the last update may still run, and torchft copies on another stream
        copy = {name: _copy(value) for name, value in state_dict.items()}
        with self._changed:
            self._offered = (step, copy)
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Offer the state no longer. Never waits: a transfer that has begun finishes, because it reads a copy."""
        with self._changed:
            self._offered = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Return the state after ``step`` of the rank with the address ``metadata``. Nothing in it is executed.

        Raises:
            OSError: the peer cannot be reached, or does not send the state within ``timeout``.
            EOFError: it ended meanwhile.
            pickle.UnpicklingError: it sends something else than tensors and plain values.
        """
        with _request(metadata, step, time.monotonic() + timeout.total_seconds()) as stream:
            state = read_state(stream)
        if not isinstance(state, dict):
            raise ValueError(f"{metadata}: sends {type(state).__name__} in place of the state of a replica group")
        return state

    def shutdown(self, wait: bool = True) -> None:
        """Stop the server. Transfers that have begun are cut off when the process ends."""
        with self._changed:
            self._offered, self._is_over = None, True
            self._changed.notify_all()  # wake waiters: the step is no longer served
        self._server.shutdown()
        self._server.server_close()
        if wait:
            self._thread.join()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        number = request.path.removeprefix(_PATH)
        if not number.isdecimal():
            request.send_error(404)
            return
        # The receiver may ask before this rank has collected its state.
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or (self._offered or (None,))[0] == int(number), self._seconds)
            offered = self._offered
        if offered is None or offered[0] != int(number):
            request.send_error(404, "this step is not offered")
            return
        request.send_response(200)
        request.send_header("Content-Type", "application/octet-stream")
        request.end_headers()
        write_state(offered[1], _TimedWriter(request.connection, time.monotonic() + self._seconds))


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024

    def __init__(self, address: str, serve: Callable[[BaseHTTPRequestHandler], None], seconds: float) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = seconds  # of a client that connects and does not send a request

            def do_GET(self) -> None:
                try:
                    serve(self)
                except OSError:  # the receiver left or is too slow; it reports why
                    self.close_connection = True

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        TCPServer.__init__(self, (address, 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound_socket(address)
        self.server_address = self.socket.getsockname()
        self.server_activate()


@contextmanager
def _request(metadata: str, step: int, deadline: float) -> Iterator[_TimedReader]:
    """Yield the body of the answer. Not with urllib, which obeys ``$http_proxy``: a proxy does not know the peers."""
    parts = urlsplit(metadata)
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(f"{metadata!r} is not the address of a replica group's state")
    connection = HTTPConnection(parts.hostname, parts.port, timeout=_left(deadline))
    try:
        connection.connect()
        wire = connection.sock
        connection.request("GET", f"{parts.path}{step}")
        wire.settimeout(_left(deadline))
        with connection.getresponse() as response:
            if response.status != HTTPStatus.OK:
                raise ConnectionError(f"{metadata}{step}: {response.status} {response.reason}")
            yield _TimedReader(wire, response, deadline)
    except TimeoutError as error:
        why = "the state did not arrive within fault_tolerance.process_group_timeout_ms"
        raise TimeoutError(f"{metadata}{step}: {why}") from error
    except HTTPException as error:
        raise ConnectionError(f"{metadata}{step}: the answer is not HTTP: {error!r}") from error
    finally:
        connection.close()


class _TimedReader:
    """Reads an answer up to a deadline, however slowly it arrives. A read returns all bytes that it was asked for."""

    def __init__(self, connection: socket.socket, response: HTTPResponse, deadline: float) -> None:
        self._connection, self._response, self._deadline = connection, response, deadline

    def read(self, size: int) -> bytearray:
        pieces = bytearray()
        while len(pieces) < size:
            self._connection.settimeout(_left(self._deadline))
            piece = self._response.read1(min(_PIECE, size - len(pieces)))
            if not piece:
                raise EOFError("the peer ended before it had sent its whole state")
            pieces += piece
        return pieces

    def readline(self) -> bytearray:
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self.read(1)
        return line


class _TimedWriter:
    """Writes to a connection up to a deadline."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def write(self, data: Any) -> int:
        self._connection.settimeout(_left(self._deadline))  # of the whole call, not of each packet
        self._connection.sendall(data)
        return memoryview(data).nbytes


def _left(deadline: float) -> float:
    """Return the seconds until ``deadline``, a time of ``time.monotonic``.

    Raises:
        TimeoutError: none.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _copy(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copy(inner) for inner in value]
    if isinstance(value, tuple):
        return tuple(_copy(inner) for inner in value)
    return deepcopy(value)
