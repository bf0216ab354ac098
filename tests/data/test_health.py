"""``titan doctor --full`` reports whether the hub answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from titan_core.api import CheckResult, Health, HealthContext
from titan_core.plugins.discovery import discover
from titan_core.plugins.registry import Components
from titan_data.health import check


class Answers(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(int(self.path.rsplit("/", 1)[-1]))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def hub() -> CheckResult:
    (result,) = [one for one in check(HealthContext(Components(discover()), Path("outputs"), "")) if one.subject == "hub"]
    return result


@pytest.mark.parametrize(("status", "health"), [(200, Health.OK), (404, Health.OK), (503, Health.WARNING)])
def test_the_hub_answers(server: str, monkeypatch: pytest.MonkeyPatch, status: int, health: Health) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"{server}/{status}")
    assert hub().health is health


def test_the_hub_does_not_answer(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:secret@127.0.0.1:1")
    result = hub()
    assert result.health is Health.WARNING and "does not answer" in result.detail and "secret" not in result.detail


def test_offline_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub().health is Health.NOTE
