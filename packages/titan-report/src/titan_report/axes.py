"""The horizontal axes: where the steps of a run are in tokens seen and in training time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from titan_core.toolkit.runs.run_log import RunLog
from titan_report.attempts import Attempt, attempts_of
from titan_report.charts import Chart
from titan_report.shown import finite

Positions = dict[str, list[Any]]
"""``{"steps": [...], "tokens": [...], "hours": [...]}``, all of one length. A position that is unknown is ``None``."""


def positions(runs: Sequence[RunLog], charts: Iterable[Chart]) -> list[Positions]:
    """Return the positions of all steps that ``charts`` draw, for each run."""
    drawn: list[set[int]] = [set() for _ in runs]
    for chart in charts:
        for curve in chart.curves:
            drawn[curve.run].update(curve.steps)
    return [_positions(run, sorted(steps)) for run, steps in zip(runs, drawn, strict=True)]


def _positions(run: RunLog, steps: list[int]) -> Positions:
    tokens = [(record["step"], finite(record.get("tokens_seen"))) for record in run.steps]
    attempts = attempts_of(run.events, run.times)
    timed = [(record["step"], record.get("time")) for record in (*run.validations, *run.steps)]
    hours = [(step, _training_hours(attempts, time)) for step, time in timed]
    return {"steps": steps, "tokens": _interpolated(tokens, steps), "hours": _interpolated(hours, steps)}


def _training_hours(attempts: Sequence[Attempt], time: float | None) -> float | None:
    """Return the hours that attempts at the run took until ``time``, without the pauses between them."""
    if time is None or not attempts or time < attempts[0].began:
        return None
    return sum(min(attempt.last, time) - attempt.began for attempt in attempts if attempt.began <= time) / 3600


def _interpolated(known: Sequence[tuple[int, float | None]], steps: Sequence[int]) -> list[float | None]:
    """Return the value at each of ``steps``, interpolated between the two nearest known ones; ``None`` outside of them."""
    points = sorted({step: value for step, value in known if value is not None}.items())
    found: list[float | None] = []
    for step in steps:
        after = bisect_left(points, (step,))
        if after < len(points) and points[after][0] == step:
            found.append(points[after][1])
        elif 0 < after < len(points):
            (first, low), (last, high) = points[after - 1], points[after]
            found.append(low + (high - low) * (step - first) / (last - first))
        else:
            found.append(None)
    return found
