"""What charts there are, whatever draws them: curves over steps, of all runs together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titan_report.thinning import extremes, finite
from titan_runs.run_log import RunLog

Style = Literal["line", "faint", "dots"]


@dataclass(frozen=True)
class Curve:
    """A figure of one run over its steps, thinned. ``None`` is a gap."""

    run: int
    """Number of the run, from 0."""
    label: str
    """What it shows; the same for every run."""
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    style: Style = "line"


@dataclass(frozen=True)
class Chart:
    """Curves with common axes."""

    name: str
    """For files and ids."""
    title: str
    unit: str
    form: str
    """How a value is written, in the format language that Python and d3 have in common."""
    curves: tuple[Curve, ...]
    stacked: bool = False
    """Curves are of one run, and their sum is what counts."""
    from_zero: bool = False
    """Whether the axis begins at 0."""
    note: str = ""
    """A line below the title."""


def curve(run: int, label: str, records: Sequence[dict[str, Any]], key: str, style: Style = "line") -> Curve | None:
    """The figure ``key`` of records that have it; ``None`` if no value is known."""
    having = [record for record in records if key in record]
    values = [finite(record[key]) for record in having]
    if all(value is None for value in values):
        return None
    kept = extremes(values)
    return Curve(run, label, tuple(having[index]["step"] for index in kept), tuple(values[index] for index in kept), style)


def line_charts(runs: Sequence[RunLog]) -> list[Chart]:
    """The charts that have something to show."""
    charts = [
        _loss(runs),
        _chart("grad_norm", "Gradient norm", "before clipping", ".4g", runs, [("gradient norm", "grad_norm", "line")]),
        _chart("lr", "Learning rate", "", ".3g", runs, [("learning rate", "lr", "line")], from_zero=True),
        _chart(
            "throughput", "Throughput", "tokens/s, all devices", ",.0f", runs,
            [("tokens/s", "tokens_per_second", "line")], from_zero=True,
        ),
        _memory(runs),
    ]  # fmt: skip
    return [chart for chart in charts if chart.curves]


def _loss(runs: Sequence[RunLog]) -> Chart:
    parts: list[tuple[str, str, Style]] = [("loss", "loss", "line"), ("validation", "validation_loss", "dots")]
    if any(_differs(run, "loss_max", "loss") for run in runs):
        parts.insert(0, ("highest of all ranks", "loss_max", "faint"))
    return _chart("loss", "Loss", "nats a token", ".4f", runs, parts)


def _memory(runs: Sequence[RunLog]) -> Chart:
    parts: list[tuple[str, str, Style]] = [("peak", "memory_peak_gib", "line")]
    if any(_differs(run, "memory_reserved_gib", "memory_peak_gib") for run in runs):
        parts.insert(0, ("reserved", "memory_reserved_gib", "faint"))
    retries = sum(max((finite(record.get("memory_retries")) or 0 for record in run.steps), default=0) for run in runs)
    note = f"{retries:,.0f} allocation retries: memory was short" if retries else ""
    return _chart("memory", "Memory", "GiB of a device", ".2f", runs, parts, from_zero=True, note=note)


def _differs(run: RunLog, one: str, other: str) -> bool:
    pairs = ((finite(record.get(one)), finite(record.get(other))) for record in run.steps)
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
    """Each of ``parts`` (label, key, style) of every run; the later ones lie on top."""
    curves = []
    for label, key, style in parts:
        for number, run in enumerate(runs):
            one = curve(number, label, run.validations if style == "dots" else run.steps, key, style)
            if one is not None:
                curves.append(one)
    return Chart(name, title, unit, form, tuple(curves), from_zero=from_zero, note=note)
