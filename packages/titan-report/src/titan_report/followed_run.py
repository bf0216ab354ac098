"""Follows a run through its files while it may still be in progress."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_core.api.config.toml import parse_toml
from titan_core.toolkit.files import read_text
from titan_core.toolkit.runs.files import CONFIG, EVENTS, METRICS
from titan_core.toolkit.runs.record_checks import event_flaw, metrics_flaw
from titan_core.toolkit.runs.tail import Tail
from titan_core.toolkit.runs.thinned import SignsOfLife, Thinned
from titan_report.attempts import Attempt, State, attempts_of, pace_of, state_of
from titan_report.goodput import TimeByCause, time_by_cause, with_earlier
from titan_report.shown import finite

_RECENT = 50
"""Number of latest metric lines that determine the pace of the run."""


class FollowedRun:
    """The current contents of run directory ``path``; :meth:`poll` reads new lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self._metrics, self._events = Tail(path / METRICS, metrics_flaw), Tail(path / EVENTS, event_flaw)
        self._config_stamp: tuple[int, int] | None = None
        self._polled = False
        self._taken = 0  # records, those of replaced files included
        self._changed = 0.0
        self.attempts: list[Attempt] = []
        """In order; the last one may be in progress."""
        self.spent = TimeByCause(())
        self._forget_metrics()

    def _forget_metrics(self) -> None:
        self.steps = Thinned()
        """The records of logged steps."""
        self._backwards = 0  # number of lines whose step had been logged before
        self.last: Mapping[str, Any] = {}
        """The record of the last logged step."""
        self.validation: Mapping[str, Any] = {}
        """The record of the last validation."""
        self.best_validation: float | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._signs = SignsOfLife([float(event["time"]) for event in self.events if event["event"] == "start"])

    @property
    def exists(self) -> bool:
        """Whether the run has written anything."""
        return bool(self.events or self.last or self.validation)

    @property
    def damaged(self) -> int:
        """Number of lines in its files that a run cannot have written."""
        return self._metrics.damaged + self._events.damaged + self._backwards

    def poll(self) -> None:
        """Read the lines that were added to its files."""
        taken, events = self._taken, len(self.events)
        events_replaced = self._events.read_each(self.events.append, self.events.clear)
        self._signs.begin([float(event["time"]) for event in self.events if event["event"] == "start"])
        replaced = self._metrics.read_each(self._take, self._forget_metrics)
        self._read_config()
        if self._taken > taken or len(self.events) > events or replaced or events_replaced:
            self.attempts = attempts_of(self.events, self._signs.times)
            self.spent = time_by_cause(with_earlier(self.path, self.events), self._signs.times)
            if self._polled:
                self._changed = time.monotonic()
        self._polled = True

    def quiet(self) -> float:
        """Return the seconds since its last line: by the local clock once a line has arrived here, because the clock of the
        machine that writes may be wrong."""
        if self._changed:
            return time.monotonic() - self._changed
        signs = [self._signs.newest, *(float(event["time"]) for event in self.events[-1:])]
        newest = max((sign for sign in signs if sign is not None), default=time.time())
        return max(0.0, time.time() - newest)

    def state(self) -> State | None:
        """Return the state of the last attempt; ``None`` without events."""
        if not self.attempts:
            return None
        return state_of(self.attempts[-1], pace_of([when for _, when in self._of_attempt()]), self.quiet())

    def seconds_left(self) -> float | None:
        """Return the estimated time to the last step at the recent pace, which includes validation and checkpoints; ``None``
        if it is not known."""
        steps = self.attempts[-1].start.get("steps") if self.attempts else None
        recent = self._of_attempt()
        if steps is None or len(recent) < 2 or recent[-1][0] <= recent[0][0]:
            return None
        pace = (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])
        return max(0.0, (steps - recent[-1][0]) * pace - self.quiet())

    def _of_attempt(self) -> list[tuple[int, float]]:
        """Return the step and time of the latest lines of the current attempt."""
        return [pair for pair in self._recent if self.attempts and pair[1] >= self.attempts[-1].began]

    def _take(self, record: dict[str, Any]) -> None:
        when = finite(record.get("time"))
        self._taken += 1
        if when is not None:
            self._signs.add(when)
        if "validation_loss" in record:
            self.validation = record
            value = finite(record["validation_loss"])
            if value is not None:
                self.best_validation = value if self.best_validation is None else min(value, self.best_validation)
        elif "loss" in record:
            if record["step"] <= self.last.get("step", -1):
                self._backwards += 1
                return
            self.last = record
            self.steps.add(record)
            if when is not None:
                self._recent.append((record["step"], when))

    def _read_config(self) -> None:
        file = self.path / CONFIG
        try:
            found = file.stat()
            stamp = (found.st_mtime_ns, found.st_size)
            if stamp != self._config_stamp:
                self.config = parse_toml(read_text(file, inside=file.parent))
                self._config_stamp = stamp
        except OSError:
            self.config, self._config_stamp = {}, None
        except ValueError:
            pass  # the file is being written; the next poll reads all of it
