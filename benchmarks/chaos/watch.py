"""Follows the run log of a job: what it has reported so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan_core.toolkit.runs.files import EVENTS, METRICS
from titan_core.toolkit.runs.tail import Tail


class Watch:
    """The events and steps of a run directory, which may not exist yet."""

    def __init__(self, run: Path) -> None:
        self._events, self._metrics = Tail(run / EVENTS), Tail(run / METRICS)
        self.events: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []

    def poll(self) -> None:
        """Read what was written since the last call."""
        replaced, events = self._events.read()
        self.events = [*([] if replaced else self.events), *events]
        replaced, records = self._metrics.read()
        self.records = [*([] if replaced else self.records), *records]

    def of(self, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
        """Return the events of a kind, later than a time (seconds since the epoch)."""
        return [event for event in self.events if event["event"] == kind and event["time"] > since]

    @property
    def attempt(self) -> dict[str, Any] | None:
        """The start event of the current attempt."""
        starts = self.of("start")
        return starts[-1] if starts else None

    @property
    def step(self) -> int:
        """The last step that the current attempt reported; 0 if it has not reported any yet."""
        attempt = self.attempt
        if attempt is None or not self.records:
            return 0
        last = self.records[-1]
        return int(last["step"]) if last["time"] > attempt["time"] else 0

    def ranks(self) -> list[int]:
        """Return the process id of each rank of the current attempt."""
        attempt = self.attempt
        return [] if attempt is None else [process["pid"] for process in attempt["processes"]]

    def resumed(self, since: float, world: int | None = None) -> dict[str, Any] | None:
        """Return the start of the current attempt if it began after ``since`` (on ``world`` ranks) and took a step."""
        attempt = self.attempt
        if attempt is None or attempt["time"] <= since or not self.step or self.step <= attempt["step"]:
            return None
        return attempt if world in (None, attempt["world_size"]) else None
