"""The attempts of a run, and how each of them ended according to the run's files. Resuming a run starts a new attempt."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titan_core.toolkit.runs.run_log import processes_are_gone

State = Literal["running", "stalled", "killed", "finished", "ended", "preempted", "interrupted", "failed"]
"""``ended``: stopped as intended before the last step, by the end of the data or ``training.stop_at_step``."""

QUIET_AT_LEAST = 60.0
"""Shortest time in seconds without a new record after which a run counts as stalled."""
QUIET_AT_FIRST = 600.0
"""The same before the first record, because the first step may compile."""


@dataclass(frozen=True)
class Attempt:
    """One attempt, from its start to its end, to the moment it was killed, or to now. Times are seconds since the epoch."""

    start: Mapping[str, Any]
    """The start event."""
    end: Mapping[str, Any] | None
    """The end event; ``None`` if the attempt was killed or is still running."""
    last: float
    """Time of its last event or record."""
    replaced: bool
    """Whether a later attempt exists."""
    planned: bool = False
    """Whether it begins where a stage of the run ended, as planned."""

    @property
    def stage(self) -> str:
        """Name of the stage, if the run has several; otherwise empty."""
        return str(self.start.get("stage", ""))

    @property
    def began(self) -> float:
        """Time of the start."""
        return float(self.start["time"])

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last event or record."""
        return max(0.0, self.last - self.began)


def attempts_of(events: Sequence[Mapping[str, Any]], times: Iterable[float]) -> list[Attempt]:
    """Return the attempts in ``events``.

    Args:
        events: events of the run, in order.
        times: times of the metric records, in any order.
    """
    starts = [number for number, event in enumerate(events) if event.get("event") == "start"]
    signs = sorted([*times, *(float(event["time"]) for event in events)])
    attempts: list[Attempt] = []
    for start, following in itertools.pairwise([*starts, len(events)]):
        own = events[start:following]
        began = float(own[0]["time"])
        end = next((event for event in reversed(own) if event.get("event") == "end"), None)
        if end is not None:
            last = float(end["time"])
        else:
            limit = float(events[following]["time"]) if following < len(events) else float("inf")
            last = max((sign for sign in signs if began <= sign < limit), default=began)
        planned = bool(attempts) and own[0].get("stage") != attempts[-1].start.get("stage") and _completed(attempts[-1])
        attempts.append(Attempt(own[0], end, last, following < len(events), planned))
    return attempts


def _completed(attempt: Attempt) -> bool:
    """Whether an attempt took the last step that it was to take."""
    end = attempt.end
    return end is not None and not any(end.get(how) for how in ("failed", "preempted", "interrupted", "data_ended"))


def state_of(attempt: Attempt, pace: float | None, quiet: float) -> State:
    """Return the state of ``attempt``.

    Args:
        pace: longest plausible number of seconds between records (:func:`pace_of`); ``None`` if there are too few records.
        quiet: seconds since the last record.
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
    """Return the longest plausible number of seconds between two records: ten times the median gap, and at least twice the
    longest gap (a checkpoint or a validation). Return ``None`` without gaps.

    Args:
        times: times of the latest records, in order.
    """
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return max(10 * statistics.median(gaps), 2 * max(gaps)) if gaps else None


def state_now(attempt: Attempt, times: Iterable[float]) -> State:
    """Return the current state of ``attempt``.

    Args:
        times: times of the run's metric records, in any order.
    """
    own = sorted(moment for moment in times if attempt.began <= moment <= attempt.last)
    return state_of(attempt, pace_of(own), time.time() - attempt.last)


def describe_end(attempt: Attempt, state: State) -> str:
    """Return a short description of how the attempt ended."""
    end = attempt.end or {}
    words = {
        "finished": "finished",
        "failed": f"failed: {end.get('error') or end.get('reason', '')}",
        "ended": f"ended: {end.get('reason', '')}",
        "preempted": "preempted",
        "interrupted": "interrupted",
        "killed": "killed",
        "stalled": "no end event: killed or stalled",
        "running": "running",
    }
    return words[state]
