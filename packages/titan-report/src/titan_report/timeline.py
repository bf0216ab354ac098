"""What happened to a run, by the clock: its attempts, checkpoints, findings and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titan_runs.attempts import Attempt, State, attempts_of, describe_end, state_now, state_of
from titan_runs.run_log import RunLog

Kind = Literal["start", "restart", "checkpoint", "finding", "end", "kill", "now"]

_REPEATED: tuple[Kind, ...] = ("checkpoint", "finding")
_ORDER: Mapping[Kind, int] = {"start": 0, "restart": 0, "end": 2, "kill": 2, "now": 2}
"""Of moments of the same time: a kill is placed at the last sign of life."""
MOST = 500
"""As many checkpoints, and as many findings, as are shown: the newest."""


@dataclass(frozen=True)
class Moment:
    """Something that happened."""

    kind: Kind
    time: float
    """Seconds since the epoch."""
    step: int | None
    text: str
    """What, in words."""


@dataclass(frozen=True)
class Timeline:
    """Of one run."""

    run: int
    attempts: tuple[Attempt, ...]
    moments: tuple[Moment, ...]
    """In order."""
    left_out: int
    """How many older checkpoints and findings there are beside :data:`MOST` of each."""


def timelines(runs: Sequence[RunLog]) -> list[Timeline]:
    """Those of the runs that have events."""
    return [timeline(number, run) for number, run in enumerate(runs) if run.events]


def timeline(number: int, run: RunLog) -> Timeline:
    """The timeline of the run of this number."""
    attempts = attempts_of(run.events, run.times)
    moments, left_out = moments_of(run.events, attempts, state_now(attempts[-1], run.times) if attempts else None)
    return Timeline(number, tuple(attempts), tuple(moments), left_out)


def moments_of(
    events: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt], state: State | None
) -> tuple[list[Moment], int]:
    """What happened, in order, and how many older checkpoints and findings are left out.

    Args:
        state: of the last of ``attempts``.
    """
    moments = []
    for index, one in enumerate(attempts):
        moments += _edges(one, index, state_of(one, None, 0.0) if one.replaced or state is None else state)
    left_out = 0
    for kind in _REPEATED:
        of_kind = [event for event in events if event["event"] == kind]
        left_out += max(0, len(of_kind) - MOST)
        for event in of_kind[-MOST:]:
            text = f"{event['kind']}: {event['message']}" if kind == "finding" else f"checkpoint saved: {event['path']}"
            moments.append(Moment(kind, event["time"], event["step"], text))
    return sorted(moments, key=lambda moment: (moment.time, _ORDER.get(moment.kind, 1))), left_out


def _edges(attempt: Attempt, index: int, state: State) -> list[Moment]:
    """Its start, and how it ended or how it stands."""
    mesh = " x ".join(f"{name}={degree}" for name, degree in (attempt.start.get("mesh") or {}).items())
    size = attempt.start.get("world_size", 1)
    where = f"{size} process{'' if size == 1 else 'es'}{', ' + mesh if mesh else ''}"
    begun = f"started again, after step {attempt.start['step']:,}" if index else "started"
    start = Moment("restart" if index else "start", attempt.began, attempt.start["step"], f"{begun}: {where}")
    if attempt.end is not None:
        return [start, Moment("end", attempt.last, attempt.end["step"], describe_end(attempt, state))]
    if state == "running":
        return [start, Moment("now", attempt.last, None, "running; this is its last line so far")]
    text = "killed" if state == "killed" else "killed, or stalled"
    return [start, Moment("kill", attempt.last, None, f"{text}: there is no line after this")]
