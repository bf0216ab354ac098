"""The state of a peer: what is received, what is refused, and that nobody waits for a slow receiver."""

from __future__ import annotations

import io
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import pytest
import torch

from titan_ft.state_transport import StateTransport
from titan_ft.torchft_api import write_state
from titan_testing import PATIENCE

LOCAL = "127.0.0.1"
LONG = timedelta(seconds=PATIENCE)
SHORT = timedelta(milliseconds=200)


@contextmanager
def transport(timeout: timedelta = LONG) -> Iterator[StateTransport]:
    made = StateTransport(LOCAL, LOCAL, timeout)
    yield made
    made.shutdown()


@contextmanager
def peer_that_sends(body: bytes | Callable[[IO[bytes]], None]) -> Iterator[str]:
    """A peer that answers each request with ``body``, or with what this function writes; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # the receiver has left
                body(self.wfile) if callable(body) else self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer((LOCAL, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{LOCAL}:{server.server_port}/checkpoint/"
        server.shutdown()
        thread.join()


class _Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._path, "w")


def streamed(state: object) -> bytes:
    file = io.BytesIO()
    write_state(state, file)
    return file.getvalue()


@pytest.mark.parametrize("place", ["in place of the index", "among the values"])
def test_a_malicious_state_is_refused_and_nothing_is_executed(place: str, tmp_path: Path) -> None:
    executed = tmp_path / "executed"
    evil = _Malicious(executed)
    body = pickle.dumps(evil, 2) if place == "in place of the index" else streamed({"step": 1, "origin": evil})
    with peer_that_sends(body) as address, transport() as receiver, pytest.raises(pickle.UnpicklingError):
        receiver.recv_checkpoint(0, address, 1, LONG)
    assert not executed.exists()
    pickle.loads(pickle.dumps(evil)).close()  # the attack works on one who is not careful
    assert executed.exists()


def test_a_state_that_is_cut_off_is_refused() -> None:
    body = streamed({"weight": torch.arange(1000.0)})
    with peer_that_sends(body[:-1]) as address, transport() as receiver, pytest.raises(EOFError, match="whole state"):
        receiver.recv_checkpoint(0, address, 1, LONG)


def test_a_state_arrives_as_it_was_when_it_was_offered() -> None:
    """Also if the receiver asks first, and if the sender's training continues meanwhile."""
    state = {"weight": torch.arange(1000.0), "large": torch.zeros(2**19), "counts": {"c4": 5}, "part": torch.arange(9)[3:5]}
    received: list[dict[str, Any]] = []
    with transport() as sender, transport() as receiver:
        asks = threading.Thread(target=lambda: received.append(receiver.recv_checkpoint(0, sender.metadata(), 7, LONG)))
        asks.start()
        sender.send_checkpoint([1], 7, state, LONG)
        state["weight"].zero_()
        state["counts"]["c4"] = 6  # type: ignore[index]
        asks.join(PATIENCE)
    (found,) = received
    assert torch.equal(found["weight"], torch.arange(1000.0)) and found["counts"] == {"c4": 5}
    assert found["part"].tolist() == [3, 4] and found["large"].shape == (2**19,)


def test_a_sender_does_not_wait_for_a_slow_receiver() -> None:
    """The receiver has begun to read, and stops: the sender withdraws its state at once, and offers the next one."""
    state = {"weight": torch.zeros(2**23)}  # more than a connection buffers
    with transport(timedelta(milliseconds=1)) as sender:
        port = urlsplit(sender.metadata()).port
        assert port is not None
        sender.send_checkpoint([1], 1, state, SHORT)
        with socket.create_connection((LOCAL, port), timeout=PATIENCE) as slow:
            slow.sendall(b"GET /checkpoint/1 HTTP/1.0\r\n\r\n")
            assert slow.recv(1)
            sender.disallow_checkpoint()
            sender.send_checkpoint([1], 2, state, SHORT)
            sender.disallow_checkpoint()


def test_a_state_that_does_not_arrive_in_time_is_refused() -> None:
    with transport() as sender, transport() as receiver, pytest.raises(TimeoutError):
        receiver.recv_checkpoint(0, sender.metadata(), 1, SHORT)


def test_a_state_that_arrives_byte_by_byte_is_refused_in_time() -> None:
    """Each byte arrives in time, and the state does not."""
    ended = threading.Event()

    def trickle(answer: IO[bytes]) -> None:
        while not ended.is_set():
            answer.write(b"\x80\x02")  # a pickle that goes on
            ended.wait(SHORT.total_seconds() / 4)

    with peer_that_sends(trickle) as address, transport() as receiver:
        with pytest.raises(TimeoutError, match="process_group_timeout_ms"):
            receiver.recv_checkpoint(0, address, 1, SHORT)
        ended.set()


def test_a_proxy_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://{LOCAL}:1")
    with transport() as sender, transport() as receiver:
        sender.send_checkpoint([1], 1, {"step": 1}, LONG)
        assert receiver.recv_checkpoint(0, sender.metadata(), 1, LONG) == {"step": 1}


@pytest.mark.parametrize("metadata", ["file:///etc/", "nonsense"])
def test_a_peer_with_another_kind_of_address_is_refused(metadata: str) -> None:
    with transport() as receiver, pytest.raises(ValueError, match="is not the address"):
        receiver.recv_checkpoint(0, metadata, 1, LONG)


def test_a_step_that_is_not_offered_is_refused() -> None:
    with transport(SHORT) as sender, transport() as receiver:
        sender.send_checkpoint([1], 2, {"step": 2}, SHORT)
        with pytest.raises(OSError, match="not offered"):
            receiver.recv_checkpoint(0, sender.metadata(), 1, LONG)
