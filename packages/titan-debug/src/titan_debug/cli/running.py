"""Asking a run that is going on for something, and waiting until its ranks have answered. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_core.errors import UserError
from titan_core.metrics.run_log import RunLog
from titan_debug.request import ask

POLL_SECONDS = 0.2


def world_size(run: str, otherwise: str) -> int:
    """How many ranks a run has that goes on.

    Args:
        otherwise: what to do about one that does not.

    Raises:
        UserError: it does not.
    """
    start = _going_on(run)
    if start is None:
        raise UserError.one(f"run {run!r}", "it is not going on", otherwise)
    size: int = start["world_size"]
    return size


def ask_and_wait(run: str, folder: Path, why: str, answers: Sequence[Path], seconds: float) -> list[int]:
    """Ask ``run`` for something in ``folder``, and wait until the files ``answers``, by rank, have changed, or the run is
    over.

    Returns:
        The ranks that have not answered in time.

    Raises:
        UserError: ``folder`` cannot be written.
    """
    waiting = dict(enumerate(answers))
    before = [_version(file) for file in answers]
    try:
        ask(folder, why)
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise UserError.one(str(folder), reason, "ask from where the run can write") from None
    deadline = time.monotonic() + seconds
    ended = False
    while waiting and not ended and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        ended = _going_on(run) is None  # before the last look
        waiting = {rank: file for rank, file in waiting.items() if _version(file) == before[rank]}
    return list(waiting)


def _going_on(run: str) -> dict[str, Any] | None:
    """How it was started; ``None`` if it has ended."""
    states = [event for event in RunLog.read_events(run) if event["event"] in ("start", "end")]
    return states[-1] if states and states[-1]["event"] == "start" else None


def _version(file: Path) -> Any:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
