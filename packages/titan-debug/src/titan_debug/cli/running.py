"""Requests to a running job, and waiting until its ranks have answered. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_core.api.errors import UserError
from titan_debug.request import ask
from titan_runs.attempts import processes_are_gone
from titan_runs.run_log import RunLog

POLL_SECONDS = 0.2


def world_size(run: str, otherwise: str) -> int:
    """How many ranks a running job has.

    Args:
        otherwise: what to do about one that does not.

    Raises:
        UserError: it does not.
    """
    start = _going_on(run)
    if start is None:
        raise UserError.one(f"run {run!r}", "it is not running", otherwise)
    if processes_are_gone(start):
        raise UserError.one(f"run {run!r}", "it is not running: its process was killed", otherwise)
    size: int = start["world_size"]
    return size


def ask_and_wait(run: str, folder: Path, why: str, missing: Callable[[], list[int]], seconds: float) -> list[int]:
    """Ask ``run`` for something in ``folder``, and wait until no rank is ``missing``, or the run is over.

    Returns:
        The ranks that have not answered in time.

    Raises:
        UserError: ``folder`` cannot be written.
    """
    try:
        ask(folder, why)
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise UserError.one(str(folder), reason, "ask from where the run can write") from None
    deadline = time.monotonic() + seconds
    ended = False
    while (waiting := missing()) and not ended and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        start = _going_on(run)
        ended = start is None or processes_are_gone(start)  # before the last look
    return waiting


def _going_on(run: str) -> dict[str, Any] | None:
    """How it was started; ``None`` if it has ended."""
    states = [event for event in RunLog.read_events(run) if event["event"] in ("start", "end")]
    return states[-1] if states and states[-1]["event"] == "start" else None
