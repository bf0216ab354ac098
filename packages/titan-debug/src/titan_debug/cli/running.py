"""Sends requests to a running job, and waits for the answers of its ranks. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_core.api import UserError
from titan_core.toolkit.runs.run_log import RunLog, processes_are_gone
from titan_debug.request import send_request

POLL_SECONDS = 0.2


def world_size(run: str, fix: str) -> int:
    """Return the number of ranks of a running job.

    Args:
        fix: what the user can do if the job is not running.

    Raises:
        UserError: the job is not running.
    """
    start = _current_start(run)
    if start is None:
        raise UserError.one(f"run {run!r}", "is not running", fix)
    if processes_are_gone(start):
        raise UserError.one(f"run {run!r}", "is not running: its process was killed", fix)
    size: int = start["world_size"]
    return size


def request_and_wait(run: str, folder: Path, why: str, missing: Callable[[], list[int]], seconds: float) -> list[int]:
    """Send a request to ``run`` through ``folder``, and wait until no rank is ``missing`` or the run has ended.

    Returns:
        The ranks that did not answer within ``seconds``.

    Raises:
        UserError: ``folder`` is not writable.
    """
    try:
        send_request(folder, why)
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise UserError.one(
            str(folder), reason, "run the command as a user, and on a machine, that can write there"
        ) from None
    deadline = time.monotonic() + seconds
    ended = False
    while (waiting := missing()) and not ended and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        start = _current_start(run)
        ended = start is None or processes_are_gone(start)  # read before the answers are checked for the last time
    return waiting


def _current_start(run: str) -> dict[str, Any] | None:
    """Return the start event of the current attempt; ``None`` if it has ended."""
    states = [event for event in RunLog.read_events(run) if event["event"] in ("start", "end")]
    return states[-1] if states and states[-1]["event"] == "start" else None
