"""Time of a run by cause: every second of every rank, over all of its attempts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_core.api.config.numbers import LARGEST
from titan_core.toolkit.own_files import require_inside
from titan_core.toolkit.runs.files import EVENTS, PREVIOUS
from titan_core.toolkit.runs.record_checks import checked_records, event_flaw
from titan_report.attempts import Attempt, attempts_of
from titan_report.shown import UNKNOWN, Table, duration

NOT_RECORDED = "not recorded"
CAUSES: Mapping[str, str] = {
    "steps": "steps that count, from the forward pass to the update",
    "lost": "steps that a later attempt trained again, and the last moments of an attempt that was killed",
    "start": "of the first attempt, until its first step: imports, ranks that meet, the model, its weights",
    "restart": "of a later attempt, likewise; the launcher's also from the failure on",
    "compile": "the first step of each attempt of a job that compiles",
    "data": "waits for the batch, of this rank or of the slowest",
    "save": "what the host waits for checkpoints",
    "evaluation": "validation, samples and evaluations during the run",
    "idle": "between two attempts, when no rank ran",
    NOT_RECORDED: "attempts of an older version, which logged no times",
}
"""The causes in the order in which they are shown, and what they are."""
TOLERANCE = 0.01
"""Largest difference between the sum of the causes and the wall time, relative to it, that is not mentioned."""


@dataclass(frozen=True)
class AttemptTime:
    """Time by cause of one attempt, with the time since the attempt before."""

    ranks: int
    seconds: Mapping[str, float]
    """Summed over the ranks, by cause; without causes that took no time."""
    wall: float
    """The same by the clock: the time that passed, times the ranks."""


@dataclass(frozen=True)
class TimeByCause:
    """The times of all attempts of a run."""

    attempts: tuple[AttemptTime, ...]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all ranks by cause, in the order of :data:`CAUSES`; without causes that took no time."""
        total: defaultdict[str, float] = defaultdict(float)
        for attempt in self.attempts:
            for cause, each in attempt.seconds.items():
                total[cause] += each
        return {cause: total[cause] for cause in CAUSES if total[cause] > 0}

    @property
    def wall(self) -> float:
        """Seconds of all ranks from the start of the first attempt to the end, by the clock."""
        return sum(attempt.wall for attempt in self.attempts)

    @property
    def goodput(self) -> float | None:
        """The share of steps that count in the wall time; ``None`` if an attempt has not recorded its times."""
        seconds = self.seconds
        return None if NOT_RECORDED in seconds or not self.wall else seconds.get("steps", 0.0) / self.wall

    @property
    def is_recorded(self) -> bool:
        """Whether the run has recorded the times of an attempt."""
        return bool(self.seconds.keys() - {NOT_RECORDED})

    @property
    def difference(self) -> float:
        """By how much the causes exceed the wall time, relative to it."""
        return sum(self.seconds.values()) / self.wall - 1 if self.wall else 0.0


def time_by_cause(events: Sequence[Mapping[str, Any]], times: Iterable[float]) -> TimeByCause:
    """Return the time by cause of a run.

    Args:
        events: events of the run, in order.
        times: times of the metric records, in any order.
    """
    attempts = attempts_of(events, times)
    starts = [number for number, event in enumerate(events) if event.get("event") == "start"]
    spent: list[AttemptTime] = []
    before: float | None = None  # the end of the attempt before
    for number, (attempt, (first, last)) in enumerate(
        zip(attempts, itertools.pairwise([*starts, len(events)]), strict=True)
    ):
        later = attempts[number + 1 :]
        ended = _end(attempt, later[0].start if later else None)
        own = [event for event in events[first:last] if event["event"] == "spent" and float(event["time"]) <= ended]
        resumed = min((int(each.start["step"]) for each in later), default=None)
        again = number > 0 or _was_restarted(attempt.start)
        spent.append(_attempt_time(attempt, own, ended, before, resumed, again))
        before = ended
    return TimeByCause(tuple(spent))


def _attempt_time(
    attempt: Attempt,
    spent: Sequence[Mapping[str, Any]],
    ended: float,
    before: float | None,
    resumed: int | None,
    again: bool,
) -> AttemptTime:
    """Return the time by cause of an attempt.

    Args:
        spent: its events of that kind until it ended.
        ended: when it did, in seconds since the epoch.
        before: when the attempt before did.
        resumed: the step after which later attempts trained again.
        again: whether there was an attempt before.
    """
    start, ranks = attempt.start, max(0, min(int(attempt.start["world_size"]), LARGEST))
    recorded = "began" in start
    began = float(start["began"] if recorded else start["time"])
    gap = 0.0 if before is None else ranks * max(0.0, began - before)
    length = ranks * max(0.0, ended - began)
    seconds: defaultdict[str, float] = defaultdict(float)
    if not recorded:
        seconds[NOT_RECORDED] = gap + length
    else:
        seconds["idle"] = gap
        if spent:
            seconds.update({cause: float(each) for cause, each in spent[-1]["seconds"].items() if cause in CAUSES})
            rest = ranks * max(0.0, ended - float(spent[-1]["time"]))
            clean = attempt.end is not None and not attempt.end.get("failed")
            seconds["lost" if attempt.replaced and not clean else "steps"] += rest
            lost = seconds["steps"] - _steps_until(resumed, start, spent) if resumed is not None else 0.0
            if lost > 0:
                seconds["steps"] -= lost
                seconds["lost"] += lost
        else:
            seconds["start"] = length
        if again:
            seconds["restart"] += seconds.pop("start", 0.0)
    return AttemptTime(ranks, {cause: value for cause, value in seconds.items() if value > 0}, gap + length)


def _steps_until(step: int, start: Mapping[str, Any], spent: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds that steps had taken after ``step``, between two events in proportion to the steps."""
    known = [(int(start["step"]), 0.0), *((int(each["step"]), float(each["seconds"].get("steps", 0.0))) for each in spent)]
    for (first, less), (last, more) in itertools.pairwise(known):
        if first <= step < last:
            return less + (more - less) * (step - first) / (last - first)
    return 0.0 if step < known[0][0] else float("inf")


def _end(attempt: Attempt, following: Mapping[str, Any] | None) -> float:
    """Return when an attempt ended: if the launcher restarted it, when it failed; else the time of its last sign of life."""
    if following is None or "began" not in following:
        return attempt.last
    begun = float(following["began"])
    return begun if _was_restarted(following) else min(attempt.last, begun)


def _was_restarted(start: Mapping[str, Any]) -> bool:
    """Whether the launcher started the attempt again after another one."""
    return "began" in start and start.get("launched", start["began"]) != start["began"]


def with_earlier(path: Path, events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return ``events`` of the run in ``path``, and before them those of attempts that its launcher restarted from step 0,
    for want of a checkpoint. Their files are in ``previous``.

    Raises:
        UserError: a file cannot be read, or is damaged.
    """
    found = list(events)
    folders = (path / PREVIOUS).glob("[0-9]*")
    require_inside(path, [PREVIOUS], contents=False)
    files = {int(folder.name): folder / EVENTS for folder in folders if folder.name.isdigit() and not folder.is_symlink()}
    for _, file in sorted(files.items(), reverse=True):
        first = next((event for event in found if event["event"] == "start"), None)
        if first is None or not _was_restarted(first):
            break
        if not file.exists():
            continue  # a copy that a resumed attempt made of the config or the metrics
        earlier = list(checked_records(file, event_flaw))
        if not any(event.get("launched") == first["launched"] for event in earlier if event["event"] == "start"):
            break
        found = [*earlier, *found]
    return found


def time_table(spent: TimeByCause) -> Table:
    """Return the table of the causes. Times are those of all ranks."""
    wall, seconds = spent.wall, spent.seconds
    rows = [(cause, duration(each), f"{each / wall:.1%}", CAUSES[cause]) for cause, each in seconds.items() if wall]
    rows.append(
        ("wall time", duration(wall), "100.0%" if wall else UNKNOWN, "from the start of the first attempt to the end")
    )
    return Table("", ("cause", "time of all ranks", "share", "what it is"), tuple(rows))


def time_note(spent: TimeByCause) -> str:
    """Return the sentence above the table."""
    if not spent.is_recorded:
        return "Not recorded: an older version wrote this run."
    goodput = NOT_RECORDED if spent.goodput is None else f"{spent.goodput:.1%}"
    note = f"Goodput: {goodput}, the share of the steps that count."
    if abs(spent.difference) > TOLERANCE:
        note += f" The causes sum to {1 + spent.difference:.1%} of the wall time: clocks of machines differ, or one was set."
    return note


def goodput_line(spent: TimeByCause) -> str:
    """Return the goodput, and the causes that took the most of the rest, in one line."""
    if spent.goodput is None or not spent.is_recorded:
        return NOT_RECORDED
    others = {
        cause: share for cause, each in spent.seconds.items() if cause != "steps" and (share := each / spent.wall) >= 0.001
    }
    largest = sorted(others, key=lambda cause: -others[cause])[:4]
    return ", ".join([f"{spent.goodput:.1%}", *(f"{cause} {others[cause]:.1%}" for cause in largest)])
