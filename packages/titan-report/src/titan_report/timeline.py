"""The history of a run: its attempts, checkpoints and findings with their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titan_core.toolkit.runs.run_log import RunLog
from titan_report.attempts import Attempt, State, attempts_of, describe_end, state_now, state_of

Kind = Literal["start", "restart", "stage", "checkpoint", "finding", "rewind", "end", "kill", "now"]

_REPEATED: tuple[Kind, ...] = ("checkpoint", "finding")
_ORDER: Mapping[Kind, int] = {"start": 0, "restart": 0, "stage": 0, "end": 2, "kill": 2, "now": 2}
"""Order of moments with the same time. A kill has the time of the last sign of life."""
MOST = 500
"""Largest number of checkpoints, and of findings, to show: the newest."""


@dataclass(frozen=True)
class Moment:
    """One event in the history of a run."""

    kind: Kind
    time: float
    """Seconds since the epoch."""
    step: int | None
    text: str
    """Description of the event."""


@dataclass(frozen=True)
class Timeline:
    """The history of one run."""

    run: int
    attempts: tuple[Attempt, ...]
    moments: tuple[Moment, ...]
    """In order of time."""
    omitted: int
    """Number of older checkpoints and findings, beyond :data:`MOST` of each, that are omitted."""


def timelines(runs: Sequence[RunLog]) -> list[Timeline]:
    """Return the timelines of the runs that have events."""
    return [timeline(number, run) for number, run in enumerate(runs) if run.events]


def timeline(number: int, run: RunLog) -> Timeline:
    """Return the timeline of run number ``number``."""
    attempts = attempts_of(run.events, run.times)
    moments, omitted = moments_of(run.events, attempts, state_now(attempts[-1], run.times) if attempts else None)
    return Timeline(number, tuple(attempts), tuple(moments), omitted)


def moments_of(
    events: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt], state: State | None
) -> tuple[list[Moment], int]:
    """Return the moments in order, and the number of older checkpoints and findings that are omitted.

    Args:
        state: the state of the last of ``attempts``.
    """
    moments = []
    branch = next((event for event in events if event["event"] == "branch"), None)
    first = "started" if branch is None else f"branched off {branch['parent']} after step {branch['step']:,}"
    for index, attempt in enumerate(attempts):
        attempt_state = state_of(attempt, None, 0.0) if attempt.replaced or state is None else state
        followed = index + 1 < len(attempts) and attempts[index + 1].planned
        begun = f"restarted after step {attempt.start['step']:,}" if index else first
        moments += _edges(attempt, begun, index, attempt_state)[: 1 if followed else None]
    went_back = (event for event in events if event["event"] == "rewind")
    moments += [Moment("rewind", event["time"], event["step"], describe_rewind(event)) for event in went_back]
    omitted = 0
    for kind in _REPEATED:
        of_kind = [event for event in events if event["event"] == kind]
        omitted += max(0, len(of_kind) - MOST)
        for event in of_kind[-MOST:]:
            text = f"{event['kind']}: {event['message']}" if kind == "finding" else f"checkpoint saved: {event['path']}"
            moments.append(Moment(kind, event["time"], event["step"], text))
    return sorted(moments, key=lambda moment: (moment.time, _ORDER.get(moment.kind, 1))), omitted


def describe_rewind(event: Mapping[str, Any]) -> str:
    """Return what a rewind event says: ``"went back from step 11 to step 4, without 12 documents"``."""
    begin = event.get("from")  # runs of earlier versions do not say it
    text = f"went back {'' if begin is None else f'from step {begin:,} '}to step {event['step']:,}"
    number = event["documents"]
    return f"{text}, without {number:,} document{'' if number == 1 else 's'}" if number else text


def _edges(attempt: Attempt, begun: str, index: int, state: State) -> list[Moment]:
    """Return the start of an attempt, which ``begun`` describes, and its end or current state."""
    mesh = " x ".join(f"{name}={degree}" for name, degree in (attempt.start.get("mesh") or {}).items())
    size = attempt.start.get("world_size", 1)
    where = f"{size} process{'' if size == 1 else 'es'}{', ' + mesh if mesh else ''}"
    kind: Kind = "restart" if index else "start"
    if attempt.planned:
        kind, begun = "stage", f"began after step {attempt.start['step']:,}"
    stage = f"stage {attempt.stage!r} " if attempt.stage else ""
    start = Moment(kind, attempt.began, attempt.start["step"], f"{stage}{begun}: {where}")
    if attempt.end is not None:
        return [start, Moment("end", attempt.last, attempt.end["step"], describe_end(attempt, state))]
    if state == "running":
        return [start, Moment("now", attempt.last, None, "running; last output so far")]
    text = "killed" if state == "killed" else "killed or stalled"
    return [start, Moment("kill", attempt.last, None, f"{text}: no output after this")]
