"""A run's attempts: it may have been started several times, and how each time ended, as far as its files say."""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titan_core.api.processes import pid_namespace

State = Literal["running", "stalled", "killed", "finished", "ended", "preempted", "interrupted", "failed"]
"""``ended``: before the last step, as it should (the data's end, ``training.stop_at_step``)."""

QUIET_AT_LEAST = 60.0
"""A run is never called stalled before it has been quiet for so many seconds."""
QUIET_AT_FIRST = 600.0
"""The same before its first line: the first step may compile."""


@dataclass(frozen=True)
class Attempt:
    """From a start to an end, a kill, or now. Times are seconds since the epoch."""

    start: Mapping[str, Any]
    """The event."""
    end: Mapping[str, Any] | None
    """The event; ``None`` if it was killed, or has not ended yet."""
    last: float
    """When it gave its last sign of life."""
    replaced: bool
    """Whether another one was started after it."""

    @property
    def began(self) -> float:
        """When."""
        return float(self.start["time"])

    @property
    def seconds(self) -> float:
        """How long it lived, as far as is known."""
        return max(0.0, self.last - self.began)


def attempts_of(events: Sequence[Mapping[str, Any]], times: Iterable[float]) -> list[Attempt]:
    """The attempts that ``events`` record.

    Args:
        times: of the records of metrics: further signs of life, in any order.
    """
    starts = [number for number, event in enumerate(events) if event.get("event") == "start"]
    signs = sorted([*times, *(float(event["time"]) for event in events)])
    attempts = []
    for start, following in itertools.pairwise([*starts, len(events)]):
        own = events[start:following]
        began = float(own[0]["time"])
        end = next((event for event in reversed(own) if event.get("event") == "end"), None)
        if end is not None:
            last = float(end["time"])
        else:
            limit = float(events[following]["time"]) if following < len(events) else float("inf")
            last = max((sign for sign in signs if began <= sign < limit), default=began)
        attempts.append(Attempt(own[0], end, last, following < len(events)))
    return attempts


def state_of(attempt: Attempt, pace: float | None, quiet: float) -> State:
    """How it stands with ``attempt``.

    Args:
        pace: seconds that usually pass between its lines (:func:`pace_of`); ``None`` before there are some.
        quiet: seconds since its last line.
    """
    end = attempt.end
    if end is not None:
        if end.get("completed"):
            return "finished"
        if end.get("failed"):
            return "failed"
        return "preempted" if end.get("preempted") else "interrupted" if end.get("interrupted") else "ended"
    if attempt.replaced or processes_are_gone(attempt.start):
        return "killed"
    patience = QUIET_AT_FIRST if pace is None else max(QUIET_AT_LEAST, pace)
    return "stalled" if quiet > patience else "running"


def pace_of(times: Sequence[float]) -> float | None:
    """After how many seconds without a line something is wrong, from the times of its last lines: ten times what usually
    passes between two, and twice the longest (a checkpoint, a validation)."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return max(10 * statistics.median(gaps), 2 * max(gaps)) if gaps else None


def state_now(attempt: Attempt, times: Iterable[float]) -> State:
    """How it stands at this moment, for one look.

    Args:
        times: of the records of metrics.
    """
    own = sorted(one for one in times if attempt.began <= one <= attempt.last)
    return state_of(attempt, pace_of(own), time.time() - attempt.last)


def describe_end(attempt: Attempt, state: State) -> str:
    """How it ended, in a few words."""
    end = attempt.end or {}
    words = {
        "finished": "finished",
        "failed": f"failed: {end.get('error') or end.get('reason', '')}",
        "ended": f"ended: {end.get('reason', '')}",
        "preempted": "preempted",
        "interrupted": "interrupted",
        "killed": "killed",
        "stalled": "no end: killed, or stalled",
        "running": "running",
    }
    return words[state]


def processes_are_gone(start: Mapping[str, Any]) -> bool:
    """Whether the first rank, if its process is visible from here, is there no longer."""
    processes = start.get("processes") or []
    if not processes or not isinstance(processes[0], Mapping) or processes[0].get("host") != socket.gethostname():
        return False
    own = pid_namespace()
    pid = processes[0].get("pid")
    if own is None or processes[0].get("pid_namespace") != own or not isinstance(pid, int) or pid <= 0:
        return False  # containers of one host may number their processes each for itself
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # another user's
    return False
