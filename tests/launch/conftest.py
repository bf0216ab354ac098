"""What the tests of the agent share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_core.api.launcher import OUTCOMES
from titan_launch import restart_policy


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OUTCOMES, str(tmp_path / "outcomes"))
    monkeypatch.setattr(restart_policy, "GRACE_SECONDS", 5.0)


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler_before in before.items():
        signal.signal(number, handler_before)
