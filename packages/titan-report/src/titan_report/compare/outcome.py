"""Summarises the runs of each variant, and tabulates the summaries."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from titan_core.api.metric_log import format_mfu, is_estimated
from titan_core.api.runs.run_log import RunLog
from titan_report.numbers import UNKNOWN

HEADERS = ("variant", "tokens/s", "speed-up", "step, s", "MFU", "memory, GiB", "final loss")


@dataclass(frozen=True)
class VariantOutcome:
    """Summary of all runs of a variant."""

    tokens_per_second: float
    """Sum over all devices; the median of the medians of the runs."""
    step_seconds: float
    mfu: float | None
    """``None`` if it was not measured."""
    mfu_estimated: bool
    """Whether it is relative to a measured peak."""
    memory_gib: float
    """Peak memory of the device with the highest peak."""
    final_loss: float | None
    """Loss of the last step of the last run; ``None`` if it is not finite."""


def outcome_of(runs: Sequence[RunLog], after: int) -> VariantOutcome:
    """Summarise the runs of one variant. Speed is measured over the logging windows that begin after step ``after``, when
    compilation and warmup are over."""
    mfus = [_median(run, "mfu", after) for run in runs if "mfu" in run.steps[-1]]
    return VariantOutcome(
        statistics.median(_median(run, "tokens_per_second", after) for run in runs),
        statistics.median(_median(run, "step_seconds", after) for run in runs),
        statistics.median(mfus) if mfus else None,
        any(is_estimated(run.steps) for run in runs),
        max(record["memory_peak_gib"] for run in runs for record in run.steps),
        runs[-1].steps[-1]["loss"],
    )


def _median(run: RunLog, key: str, after: int) -> float:
    ends = [record["step"] for record in run.steps]
    begins = [0, *ends[:-1]]
    windows = [record[key] for begin, record in zip(begins, run.steps, strict=True) if begin >= after]
    return float(statistics.median(windows or [run.steps[-1][key]]))


def rows_of(outcomes: Sequence[tuple[str, VariantOutcome | None]]) -> list[tuple[str, ...]]:
    """Return a row of :data:`HEADERS` for each variant. The speed-up is relative to the first variant that did not fail."""
    return [
        (name, *(_cells(*figures) if figures else ("failed", *[""] * (len(HEADERS) - 2))))
        for name, figures in _with_speed_up(outcomes)
    ]


def csv_rows_of(outcomes: Sequence[tuple[str, VariantOutcome | None]]) -> list[tuple[object, ...]]:
    """Return the same table for programs, with a header row. The cells of a failed variant are empty."""
    rows: list[tuple[object, ...]] = [
        ("variant", "tokens_per_second", "speed_up", "step_seconds", "mfu", "memory_gib", "final_loss")
    ]
    for name, figures in _with_speed_up(outcomes):
        if figures is None:
            rows.append((name, *[None] * (len(rows[0]) - 1)))
        else:
            outcome, speed_up = figures
            rows.append((
                name, outcome.tokens_per_second, speed_up, outcome.step_seconds, outcome.mfu, outcome.memory_gib,
                outcome.final_loss,
            ))  # fmt: skip
    return rows


def _with_speed_up(
    outcomes: Sequence[tuple[str, VariantOutcome | None]],
) -> list[tuple[str, tuple[VariantOutcome, float] | None]]:
    baseline = next((outcome.tokens_per_second for _, outcome in outcomes if outcome is not None), 0.0)
    return [
        (name, None if outcome is None else (outcome, outcome.tokens_per_second / baseline)) for name, outcome in outcomes
    ]


def _cells(outcome: VariantOutcome, speed_up: float) -> tuple[str, ...]:
    return (
        f"{outcome.tokens_per_second:,.0f}",
        f"{speed_up:.3f}",
        f"{outcome.step_seconds:.4g}",
        UNKNOWN if outcome.mfu is None else format_mfu(outcome.mfu, outcome.mfu_estimated),
        f"{outcome.memory_gib:.2f}",
        "nan" if outcome.final_loss is None else f"{outcome.final_loss:.4f}",
    )
