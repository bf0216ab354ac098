"""Defines the line charts, independent of how they are drawn: curves over steps, with all runs in one chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from titan_core.toolkit.runs.run_log import RunLog
from titan_report.shown import finite
from titan_report.timeline import describe_rewind

POINTS = 2000
"""Largest number of points to draw of a curve."""

Style = Literal["line", "faint", "dots", "marks"]


@dataclass(frozen=True)
class Curve:
    """A metric of one run over its steps, thinned. ``None`` is a gap."""

    run: int
    """Number of the run, from 0."""
    label: str
    """Name of the metric, the same for every run."""
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    style: Style = "line"
    texts: tuple[str, ...] = ()
    """What each of the points of style ``"marks"`` stands for."""


@dataclass(frozen=True)
class Chart:
    """Curves with common axes."""

    name: str
    """Used in file names and element ids."""
    title: str
    unit: str
    form: str
    """Number format, in the language that Python and d3 have in common."""
    curves: tuple[Curve, ...]
    stacked: bool = False
    """Whether the curves are stacked. They then belong to one run."""
    from_zero: bool = False
    """Whether the axis starts at 0."""
    note: str = ""
    """A line below the title."""


def curve(run: int, label: str, records: Sequence[dict[str, Any]], key: str, style: Style = "line") -> Curve | None:
    """Return the curve of metric ``key`` over the records that have it; ``None`` if no value is finite."""
    having = [record for record in records if key in record]
    values = [finite(record[key]) for record in having]
    if all(value is None for value in values):
        return None
    kept = extremes(values)
    return Curve(run, label, tuple(having[index]["step"] for index in kept), tuple(values[index] for index in kept), style)


def line_charts(runs: Sequence[RunLog]) -> list[Chart]:
    """Return the charts that are not empty."""
    charts = [
        _loss(runs),
        _chart("grad_norm", "Gradient norm", "before clipping", ".4g", runs, [("gradient norm", "grad_norm", "line")]),
        _chart("lr", "Learning rate", "", ".3g", runs, [("learning rate", "lr", "line")], from_zero=True),
        _chart(
            "throughput", "Throughput", "tokens/s, all devices", ",.0f", runs,
            [("tokens/s", "tokens_per_second", "line")], from_zero=True,
        ),
        _memory(runs),
        *_metrics(runs),
        *_evaluations(runs),
    ]  # fmt: skip
    return [chart for chart in charts if chart.curves]


_NAMED = "validation_loss/"
"""Prefix of validations with a name, such as those of averaged weights."""


_COUNTS = ("tokens_seen/", "validation_")
"""Prefixes of figures that are part of other charts or of none."""


def _loss(runs: Sequence[RunLog]) -> Chart:
    parts: list[tuple[str, str, Style]] = [("loss", "loss", "line"), ("validation", "validation_loss", "dots")]
    named = dict.fromkeys(key for run in runs for one in run.validations[-1:] for key in one if key.startswith(_NAMED))
    parts += [(f"validation ({key.removeprefix(_NAMED)})", key, "dots") for key in named]
    if any(_differs(run, "loss_max", "loss") for run in runs):
        parts.insert(0, ("highest of all ranks", "loss_max", "faint"))
    chart = _chart("loss", "Loss", "nats per token", ".4f", runs, parts)
    marks = (_rewinds(number, run) for number, run in enumerate(runs))
    return replace(chart, curves=(*chart.curves, *(mark for mark in marks if mark is not None)))


def _rewinds(number: int, run: RunLog) -> Curve | None:
    """Return marks where a run went back to, at the loss that it had logged there before; ``None`` if it never did."""
    events = sorted((event for event in run.events if event["event"] == "rewind"), key=lambda event: int(event["step"]))
    losses = [(int(record["step"]), value) for record in run.steps if (value := finite(record["loss"])) is not None]
    if not events or not losses:
        return None
    steps = tuple(int(event["step"]) for event in events)
    values = tuple(next((loss for at, loss in reversed(losses) if at <= step), losses[0][1]) for step in steps)
    return Curve(number, "went back", steps, values, "marks", tuple(describe_rewind(event) for event in events))


def _metrics(runs: Sequence[RunLog]) -> list[Chart]:
    """Return a chart for each metric called ``GROUP/NAME``, added by the objective, experts, a plugin."""
    last = [record for run in runs for records in (run.steps, run.validations) for record in records[-1:]]
    keys = dict.fromkeys(key for record in last for key in record if "/" in key and not key.startswith(_COUNTS))
    return [
        _chart(
            key.replace("/", "-"), key.partition("/")[2], key.partition("/")[0], ".4g", runs,
            [("mean of a step", key, "line"), ("validation", key, "dots")],
        )
        for key in keys
    ]  # fmt: skip


def _evaluations(runs: Sequence[RunLog]) -> list[Chart]:
    """Return a chart for each score of a task, and what else runs have logged apart from steps and validations."""
    records = (record for run in runs for record in run.evaluations)
    keys = dict.fromkeys(key for record in records for key in record if "/" in key and not key.endswith("_stderr"))
    charts = []
    for key in keys:
        kind, _, name = key.partition("/")
        found = (curve(number, name, run.evaluations, key, "dots") for number, run in enumerate(runs))
        curves = tuple(one for one in found if one is not None)
        charts.append(Chart(key.replace("/", "-"), name, kind, ".4g", curves))
    return charts


def _memory(runs: Sequence[RunLog]) -> Chart:
    parts: list[tuple[str, str, Style]] = [("peak", "memory_peak_gib", "line")]
    if any(_differs(run, "memory_reserved_gib", "memory_peak_gib") for run in runs):
        parts.insert(0, ("reserved", "memory_reserved_gib", "faint"))
    retries = sum(max((finite(record.get("memory_retries")) or 0 for record in run.steps), default=0) for run in runs)
    note = f"{retries:,.0f} allocation retries: memory ran short" if retries else ""
    return _chart("memory", "Memory", "GiB per device", ".2f", runs, parts, from_zero=True, note=note)


def _differs(run: RunLog, first: str, second: str) -> bool:
    pairs = ((finite(record.get(first)), finite(record.get(second))) for record in run.steps)
    return any(a is not None and b is not None and abs(a - b) > 1e-6 * abs(b) for a, b in pairs)


def _chart(
    name: str,
    title: str,
    unit: str,
    form: str,
    runs: Sequence[RunLog],
    parts: Sequence[tuple[str, str, Style]],
    from_zero: bool = False,
    note: str = "",
) -> Chart:
    """Return a chart of each of ``parts`` (label, key, style) for every run. Later parts are drawn on top."""
    curves = []
    for label, key, style in parts:
        for number, run in enumerate(runs):
            found = curve(number, label, run.validations if style == "dots" else run.steps, key, style)
            if found is not None:
                curves.append(found)
    return Chart(name, title, unit, form, tuple(curves), from_zero=from_zero, note=note)


def extremes(values: Sequence[float | None], points: int = POINTS) -> list[int]:
    """Return the indices of at most ``points`` of ``values``, in order. If there are more values, these are both ends and,
    from each of several equal stretches, the smallest value, the largest value, and a gap (``None``) if there is one."""
    if len(values) <= points:
        return list(range(len(values)))
    stretches = max(1, (points - 2) // 3)
    kept = {0, len(values) - 1}
    for number in range(stretches):
        stretch = range(number * len(values) // stretches, (number + 1) * len(values) // stretches)
        known = [(value, index) for index in stretch if (value := values[index]) is not None]
        if known:
            kept.update((min(known)[1], max(known)[1]))
        if len(known) < len(stretch):
            kept.add(next(index for index in stretch if values[index] is None))
    return sorted(kept)
