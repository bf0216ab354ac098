"""Requests to a running job, sent as a file that the job polls, and waiting for the answers. Imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titan_core.api import Run, UserError
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.files import read_bytes
from titan_core.toolkit.plain_json import plain_json
from titan_core.toolkit.runs.run_log import RunLog, processes_are_gone

REQUEST_FILE = "requested"
POLL_SECONDS = 0.2
STEP_POLL_SECONDS = 1.0
"""Shortest interval between two polls for a request at a step."""


@dataclass(frozen=True)
class Request:
    """The content of a request file."""

    why: str
    rank: int | None = None
    """The rank that sent the request; ``None`` for a person."""
    time: float = 0.0
    """Seconds since the epoch."""


def send_request(folder: Path, why: str, rank: int | None = None) -> float:
    """Request the files that the job writes to ``folder``. Return the time of the request in seconds since the epoch.

    Raises:
        OSError: the request file cannot be written.
    """
    request = Request(why, rank, time.time())
    with atomic_write(folder / REQUEST_FILE) as file:
        file.write_text(json.dumps(asdict(request)))
    return request.time


class Requests:
    """Receives requests that arrive after its construction. It ignores a file that an earlier attempt left behind, and does
    not depend on synchronised clocks."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / REQUEST_FILE
        self._seen = version(self._file)

    def new(self) -> Request | None:
        """Return the request that arrived since the last call, if any."""
        now = version(self._file)
        if now is None or now == self._seen:
            return None
        self._seen = now
        try:
            read = plain_json(read_bytes(self._file))
            return Request(str(read["why"]), read["rank"], float(read["time"]))
        except (OSError, ValueError, KeyError, TypeError):  # touched by hand, or already removed
            return Request(f"{REQUEST_FILE} was touched")

    def send(self, why: str, rank: int) -> None:
        """Send a request to the other ranks, unless a new request is already pending.

        Raises:
            OSError: the request file cannot be written.
        """
        if version(self._file) == self._seen:
            send_request(self._file.parent, why, rank)
            self._seen = version(self._file)


class StepRequest:
    """A request to serve at one step on all ranks. Rank 0 polls for it."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._shared = run.shared_request()
        self._requests = Requests(folder) if run.world.rank == 0 else None
        self._polled = 0.0

    def poll(self) -> None:
        """Look for a request, unless this rank has looked within a second. For the start of a step, which then serves it."""
        now = time.monotonic()
        if self._requests is None or now < self._polled + STEP_POLL_SECONDS:
            return
        self._polled = now
        if self._requests.new() is not None:
            self._shared.submit()

    def take(self) -> bool:
        """Return once whether the request must be served now. All ranks must call it together."""
        return self._shared.take()


def version(file: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever ``file`` is written; ``None`` if the file does not exist."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


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
