"""Summarises the runs of each variant, and tabulates the summaries with the noise of each difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from titan_core.api import Checkpoint, Component, Observer, Registry, Transform
from titan_core.api.config.sections import CORE_SECTIONS
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import format_mfu, is_estimated
from titan_report.shown import UNKNOWN, finite

HEADERS: dict[Purpose, tuple[str, ...]] = {
    "speed": ("variant", "tokens/s", "speed-up", "step, s", "MFU", "memory, GiB", "final loss"),
    "loss": ("variant", "final loss", "difference", "validation", "tokens/s", "memory, GiB"),
}
_CSV = (
    "variant", "runs", "tokens_per_second", "speed_up", "speed_up_noise", "step_seconds", "mfu", "memory_gib", "final_loss",
    "loss_difference", "loss_difference_noise", "validation_loss",
)  # fmt: skip
_LAST = 10
"""The final loss of a run is the mean over the last tenth of its steps, because the loss of one step is noisy."""
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Quantiles of Student's t distribution for 1, 2, ... degrees of freedom, 95 % two-sided; about 2 beyond."""


@dataclass(frozen=True)
class RunOutcome:
    """Figures of one run."""

    speeds: tuple[float, ...]
    """Tokens per second over all devices, of each logging window after warmup."""
    step_seconds: float
    """Median."""
    mfu: float | None
    """``None`` if it was not measured."""
    mfu_estimated: bool
    """Whether it is relative to a measured peak."""
    memory_gib: float
    """Peak memory of the device with the highest peak."""
    final_loss: float | None
    """Mean over the last tenth of the steps; ``None`` if it is not finite."""
    validation_loss: float | None
    """Of the last validation; ``None`` if there was none, or it is not finite."""


@dataclass(frozen=True)
class Difference:
    """How a variant differs from the first one."""

    value: float
    noise: float | None
    """Half the width of the interval that contains the true value with 95 % confidence; ``None`` if it is unknown."""
    neutral: float = 0.0
    """The value of no difference."""

    @property
    def within_noise(self) -> bool:
        """Whether there may be no difference."""
        return self.noise is not None and abs(self.value - self.neutral) <= self.noise


@dataclass(frozen=True)
class VariantOutcome:
    """All runs of a variant, by round."""

    runs: tuple[RunOutcome, ...]

    @property
    def tokens_per_second(self) -> float:
        """The median of the medians of the runs."""
        return statistics.median(statistics.median(run.speeds) for run in self.runs)

    @property
    def final_loss(self) -> float | None:
        """The mean over the runs; ``None`` if it is not finite in one of them."""
        return _mean([run.final_loss for run in self.runs])

    @property
    def validation_loss(self) -> float | None:
        """The mean over the runs; ``None`` if one has none."""
        return _mean([run.validation_loss for run in self.runs])


def outcome_of(runs: Sequence[RunLog], after: int) -> VariantOutcome:
    """Summarise the runs of one variant. Speed is measured over the logging windows that begin after step ``after``, when
    compilation and warmup are over."""
    return VariantOutcome(tuple(_run(run, after) for run in runs))


def speed_up(outcome: VariantOutcome, base: VariantOutcome) -> Difference:
    """Return the speed relative to ``base``. Runs of one round are compared with each other, because other load on the
    machine changes from round to round. The noise is that between rounds, or that within the runs if it is larger."""
    pairs = list(zip(outcome.runs, base.runs, strict=False))
    ratios = [statistics.median(run.speeds) / statistics.median(other.speeds) for run, other in pairs]
    errors = [(_error(run), _error(other)) for run, other in pairs]
    within = [math.hypot(one, other) for one, other in errors if one is not None and other is not None]
    noises = [2 * math.hypot(*within) / len(within)] if within else []
    if len(ratios) > 1:
        noises.append(_half_width(ratios))
    return Difference(statistics.median(ratios), max(noises, default=None), neutral=1.0)


def loss_difference(outcome: VariantOutcome, base: VariantOutcome) -> Difference | None:
    """Return the final loss minus that of ``base``; ``None`` if one of them is not finite. Runs of one round have the same
    seed."""
    pairs = [(run.final_loss, other.final_loss) for run, other in zip(outcome.runs, base.runs, strict=False)]
    differences = [loss - other for loss, other in pairs if loss is not None and other is not None]
    if not differences or len(differences) < len(pairs):
        return None
    return Difference(statistics.fmean(differences), _half_width(differences) if len(differences) > 1 else None)


def rows_of(outcomes: Sequence[tuple[str, VariantOutcome | None]], purpose: Purpose) -> list[tuple[str, ...]]:
    """Return a row of :data:`HEADERS` for each variant. Differences are relative to the first variant that did not fail."""
    base = _base(outcomes)
    empty = [""] * (len(HEADERS[purpose]) - 2)
    cells = _speed_cells if purpose == "speed" else _loss_cells
    return [
        (name, "failed", *empty) if outcome is None or base is None else (name, *cells(outcome, base))
        for name, outcome in outcomes
    ]


def csv_rows_of(outcomes: Sequence[tuple[str, VariantOutcome | None]]) -> list[tuple[object, ...]]:
    """Return all figures for programs, with a header row. The cells of a failed variant are empty."""
    base = _base(outcomes)
    rows: list[tuple[object, ...]] = [_CSV]
    for name, outcome in outcomes:
        if outcome is None or base is None:
            rows.append((name, 0, *[None] * (len(_CSV) - 2)))
            continue
        speed, loss, last = speed_up(outcome, base), loss_difference(outcome, base), outcome.runs[-1]
        rows.append((
            name, len(outcome.runs), outcome.tokens_per_second, speed.value, speed.noise, last.step_seconds, last.mfu,
            max(run.memory_gib for run in outcome.runs), outcome.final_loss,
            None if loss is None else loss.value, None if loss is None else loss.noise, outcome.validation_loss,
        ))  # fmt: skip
    return rows


def _base(outcomes: Sequence[tuple[str, VariantOutcome | None]]) -> VariantOutcome | None:
    return next((outcome for _, outcome in outcomes if outcome is not None), None)


def _run(run: RunLog, after: int) -> RunOutcome:
    last = run.steps[-1]["step"]
    losses = [finite(record["loss"]) for record in run.steps if record["step"] > last - max(1, last // _LAST)]
    validations = [finite(record["validation_loss"]) for record in run.validations]
    return RunOutcome(
        speeds=tuple(_windows(run, "tokens_per_second", after)),
        step_seconds=statistics.median(_windows(run, "step_seconds", after)),
        mfu=statistics.median(_windows(run, "mfu", after)) if "mfu" in run.steps[-1] else None,
        mfu_estimated=is_estimated(run.steps),
        memory_gib=max(record["memory_peak_gib"] for record in run.steps),
        final_loss=_mean(losses),
        validation_loss=validations[-1] if validations else None,
    )


def _windows(run: RunLog, key: str, after: int) -> list[float]:
    ends = [record["step"] for record in run.steps]
    begins = [0, *ends[:-1]]
    windows = [float(record[key]) for begin, record in zip(begins, run.steps, strict=True) if begin >= after]
    return windows or [float(run.steps[-1][key])]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _error(run: RunOutcome) -> float | None:
    """Return the relative standard error of the median speed of a run; ``None`` if it has too few windows. The median
    absolute deviation ignores a few windows that other load has slowed down."""
    if len(run.speeds) < 3:
        return None
    middle = statistics.median(run.speeds)
    deviation = 1.4826 * statistics.median(abs(speed - middle) for speed in run.speeds)
    return 1.2533 * deviation / math.sqrt(len(run.speeds)) / middle


def _half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean of ``values``."""
    degrees = len(values) - 1
    quantile = _T_95[degrees - 1] if degrees <= len(_T_95) else 2.1
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def _speed_cells(outcome: VariantOutcome, base: VariantOutcome) -> tuple[str, ...]:
    mfus = [run.mfu for run in outcome.runs if run.mfu is not None]
    estimated = any(run.mfu_estimated for run in outcome.runs)
    return (
        f"{outcome.tokens_per_second:,.0f}",
        "1" if outcome is base else _difference(speed_up(outcome, base), ".3f"),
        f"{statistics.median(run.step_seconds for run in outcome.runs):.4g}",
        UNKNOWN if not mfus else format_mfu(statistics.median(mfus), estimated),
        f"{max(run.memory_gib for run in outcome.runs):.2f}",
        _loss(outcome.final_loss),
    )


def _loss_cells(outcome: VariantOutcome, base: VariantOutcome) -> tuple[str, ...]:
    difference = None if outcome is base else loss_difference(outcome, base)
    validated = any(run.validation_loss is not None for run in outcome.runs)
    losses = [run.final_loss for run in outcome.runs if run.final_loss is not None]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 and outcome.final_loss is not None else ""
    return (
        f"{_loss(outcome.final_loss)}{spread}",
        UNKNOWN if difference is None else _difference(difference, "+.4f"),
        _loss(outcome.validation_loss) if validated else UNKNOWN,
        f"{outcome.tokens_per_second:,.0f}",
        f"{max(run.memory_gib for run in outcome.runs):.2f}",
    )


def _difference(difference: Difference, form: str) -> str:
    """Return the difference with its noise. One that may be none is marked, so that nobody reads it as a result."""
    if difference.noise is None:
        return f"{difference.value:{form}} (noise unknown)"
    shown = f"{difference.value:{form}} ± {difference.noise:{form.lstrip('+')}}"
    return f"{shown} (within noise)" if difference.within_noise else shown


def _loss(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4f}"


Purpose = Literal["speed", "loss"]

SPEED_STEPS = 20
"""Steps of each run of a comparison of speed, unless the user requests another number."""

_HOW_IT_RUNS: tuple[type[Component], ...] = (Transform, Checkpoint, Observer)
"""Kinds of components whose sections say how a job runs, and not what it learns."""
_CORE_SECTIONS = {"job", "comm", "parallelism", "metrics", "plugins"}
_CORE_KEYS = {
    "training.local_batch_size", "training.mixed_precision_param", "training.mixed_precision_reduce",
    "training.enable_cpu_offload", "training.float32_matmul_precision", "training.deterministic",
    "data.num_workers", "data.prefetch", "optimizer.implementation",
}  # fmt: skip
"""Keys of sections of the core that change how fast a job computes the same steps, up to rounding."""


def purpose_of(keys: Iterable[str], registry: Registry) -> Purpose:
    """Return "loss" if any of ``keys``, in which the variants differ, decides what is learned, such as a learning rate."""
    core = {section.section for section in CORE_SECTIONS}
    sections = {
        component.config.section
        for kind in _HOW_IT_RUNS
        for component in registry.all(kind)
        if component.config is not None and component.config.section not in core
    }
    how = _CORE_SECTIONS | sections
    return "speed" if all(key in _CORE_KEYS or key.partition(".")[0] in how for key in keys) else "loss"
