"""What the tests of the agent share."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_core.toolkit import status
from titan_core.toolkit.launching import OUTCOMES
from titan_launch.meeting import handler
from titan_launch.restart import policy as restart_policy


@pytest.fixture(autouse=True)
def _no_status_line_is_left() -> Iterator[None]:
    """An agent that fails leaves closing it to the launcher."""
    yield
    if status._shown is not None:
        status._shown.close()


@pytest.fixture(autouse=True)
def _no_machine_reports_any_more() -> Iterator[None]:
    """A machine reports until its launcher ends, or closes the rendezvous."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, handler._Reports):
            thread.stop()


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OUTCOMES, str(tmp_path / "outcomes"))
    monkeypatch.setattr(restart_policy, "GRACE_SECONDS", 5.0)


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:  # pytest may run under nohup, or in the background of a script
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler_before in before.items():
        signal.signal(number, handler_before)
