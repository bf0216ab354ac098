"""``titan doctor --rdzv-endpoint`` reports whether the machines of a job can meet there."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from titan_core.api import CheckResult, Health, HealthContext, UserError
from titan_core.plugins.discovery import discover
from titan_core.plugins.registry import Components
from titan_launch.meeting.health import check


def result_at(endpoint: str) -> CheckResult:
    (result,) = check(HealthContext(Components(discover()), Path("outputs"), endpoint))
    return result


def test_nothing_is_checked_without_an_endpoint() -> None:
    assert not list(check(HealthContext(Components(discover()), Path("outputs"), "")))


def test_a_port_of_this_machine() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        used = result_at(f"127.0.0.1:{port}")
    assert used.health is Health.ERROR and f"cannot listen on port {port}" in used.detail
    free = result_at(f"127.0.0.1:{port}")
    assert free.health is Health.OK and f"port {port} is free" in free.detail


@pytest.mark.parametrize(
    ("error", "health", "words"),
    [
        (None, Health.NOTE, "accepts connections"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), Health.OK, "nothing listens on port 29500 until"),
        (TimeoutError("timed out"), Health.ERROR, "does not answer within"),
    ],
)
def test_a_port_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, health: Health, words: str
) -> None:
    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        assert address == ("192.0.2.1", 29500)
        if error is not None:
            raise error
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    result = result_at("192.0.2.1:29500")
    assert result.health is health and words in result.detail


def test_a_host_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    result = result_at("nowhere:29500")
    assert result.health is Health.ERROR and "cannot resolve the host name 'nowhere'" in result.detail


def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(UserError, match="must be HOST:PORT"):
        result_at("node0:port")
