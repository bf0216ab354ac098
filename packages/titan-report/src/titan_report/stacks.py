"""Stacked charts, one per run: the parts of the step time, and the sources of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan_core.toolkit.runs.run_log import RunLog
from titan_report.charts import Chart, Curve, extremes
from titan_report.shown import finite

TIME_PARTS = (
    ("forward and backward", "forward_backward_seconds"),
    ("optimizer", "optimizer_seconds"),
    ("data", "data_seconds"),
    ("checkpoint", "checkpoint_seconds"),
)
"""The parts of the step time; the part that is usually the longest comes first. The rest is ``other``."""

_TOKENS = "tokens_seen/"


def step_time(number: int, run: RunLog) -> Chart | None:
    """Return the chart of the step time by part; ``None`` if no step time is known."""
    records = [record for record in run.steps if finite(record.get("step_seconds")) is not None]
    if not records:
        return None
    parts = [(label, key) for label, key in TIME_PARTS if any(finite(record.get(key)) for record in records)]
    kept = [records[index] for index in extremes([record["step_seconds"] for record in records])]
    columns = {label: [finite(record.get(key)) or 0.0 for record in kept] for label, key in parts}
    known = [sum(values) for values in zip(*columns.values(), strict=True)] or [0.0] * len(kept)
    columns["other"] = [max(0.0, record["step_seconds"] - part) for record, part in zip(kept, known, strict=True)]
    return _stack("step_time", "Step time", "seconds per step", ".3f", number, kept, columns)


def data_shares(number: int, run: RunLog) -> Chart | None:
    """Return the chart of each dataset's share of the tokens seen so far; ``None`` if there is only one dataset."""
    names = sorted({key for record in run.steps for key in record if key.startswith(_TOKENS)})
    records = [record for record in run.steps if any(finite(record.get(name)) for name in names)]
    if len(names) < 2 or not records:
        return None
    kept = [records[index] for index in extremes([_share(record, names, names[0]) for record in records])]
    columns = {name.removeprefix(_TOKENS): [_share(record, names, name) for record in kept] for name in names}
    return _stack("data_shares", "Data", "share of the tokens seen so far", ".1%", number, kept, columns)


def stacks(runs: Sequence[RunLog]) -> list[Chart]:
    """Return all stacked charts, grouped by kind."""
    found = [make(number, run) for make in (step_time, data_shares) for number, run in enumerate(runs)]
    return [chart for chart in found if chart is not None]


def _share(record: dict[str, Any], names: Sequence[str], name: str) -> float:
    return (finite(record.get(name)) or 0.0) / sum(finite(record.get(each)) or 0.0 for each in names)


def _stack(
    name: str,
    title: str,
    unit: str,
    form: str,
    number: int,
    records: Sequence[dict[str, Any]],
    columns: dict[str, list[float]],
) -> Chart:
    steps = tuple(record["step"] for record in records)
    curves = tuple(Curve(number, label, steps, tuple(values)) for label, values in columns.items())
    return Chart(name, title, unit, form, curves, stacked=True, from_zero=True)
