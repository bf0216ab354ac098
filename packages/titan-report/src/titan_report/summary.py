"""Summarises runs in a table: progress, loss, speed and state."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan_core.api.config.numbers import LARGEST
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import describe_model, format_mfu, is_estimated
from titan_report.attempts import attempts_of, describe_end, state_now
from titan_report.shown import UNKNOWN, Table, duration, figure, finite

_HEADERS = (
    "run", "model", "steps", "last loss", "best validation", "last validation",
    "tokens/s (median)", "MFU (median)", "peak memory", "wall time", "state",
)  # fmt: skip


def summary(runs: Sequence[RunLog], names: Sequence[str]) -> Table:
    """Return a table with one row per run."""
    return Table("Summary", _HEADERS, tuple(_row(run, name) for run, name in zip(runs, names, strict=True)))


def model_of(config: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
    """Return the model's name and flavor, with the number of parameters that the last attempt counted."""
    model = config.get("model", {})
    name = " ".join(str(model[key]) for key in ("name", "flavor") if model.get(key)) or UNKNOWN
    nothing: Mapping[str, Any] = {}
    start = next((event for event in reversed(events) if event["event"] == "start"), nothing)
    count, active = (
        value if isinstance(value, int) and 0 < value <= LARGEST else None
        for value in (start.get("parameters"), start.get("active_parameters"))
    )
    return name if count is None else describe_model(name, count, active)


def _row(run: RunLog, name: str) -> tuple[str, ...]:
    attempts = attempts_of(run.events, run.times)
    best = min(_known(run.validations, "validation_loss"), default=None)
    peak = max(_known(run.steps, "memory_peak_gib"), default=None)
    mfu = _median(run, "mfu")
    state = describe_end(attempts[-1], state_now(attempts[-1], run.times)) if attempts else UNKNOWN
    if len(attempts) > 1:
        state += f" ({len(attempts)} attempts)"
    return (
        name,
        model_of(run.config, run.events),
        _steps(run),
        _last(run.steps, "loss"),
        figure(best, ".4f"),
        _last(run.validations, "validation_loss"),
        figure(_median(run, "tokens_per_second"), ",.0f"),
        UNKNOWN if mfu is None else format_mfu(mfu, is_estimated(run.steps)),
        UNKNOWN if peak is None else f"{peak:.2f} GiB",
        duration(sum(attempt.seconds for attempt in attempts) if attempts else None),
        state,
    )


def _steps(run: RunLog) -> str:
    """Return the number of completed steps, of the requested number."""
    done = max([*(record["step"] for record in run.steps), *(event["step"] for event in run.events)], default=0)
    requested = next((event["steps"] for event in reversed(run.events) if event["event"] == "start"), None)
    return f"{done:,}" if requested is None else f"{done:,} of {requested:,}"


def _known(records: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [value for record in records if (value := finite(record.get(key))) is not None]


def _last(records: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the value in the last record, even if it is not finite: a NaN loss must be visible."""
    if not records:
        return UNKNOWN
    value = finite(records[-1].get(key))
    return "not finite" if value is None else f"{value:.4f}"


def _median(run: RunLog, key: str) -> float | None:
    values = _known(run.even_steps, key)
    return statistics.median(values) if values else None
