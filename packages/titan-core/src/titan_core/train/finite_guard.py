"""Stop a run whose loss or gradient norm is no number any more."""

from __future__ import annotations

import math

from titan_core.hookspecs import hookimpl
from titan_core.job.job import JobFacts
from titan_core.train.events import StepReport


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is NaN or infinite: a run's failure, not a mistake in its config."""


class FiniteGuard:
    """Looks at each step when the next one has been issued, so that a GPU need not be waited for."""

    def __init__(self) -> None:
        self._previous: StepReport | None = None

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Check this step on a CPU, the one before it on a GPU."""
        if report.loss.device.type == "cpu":
            _check(report)  # nothing is in flight, so nothing is gained by waiting a step
            return
        previous, self._previous = self._previous, report
        if previous is not None:
            _check(previous)

    @hookimpl
    def titan_settle(self, step: int) -> None:
        """Check the step that was not looked at yet, before a checkpoint keeps what it did."""
        previous, self._previous = self._previous, None
        if previous is not None:
            _check(previous)


def _check(report: StepReport) -> None:
    loss, norm = report.loss.item(), report.grad_norm.item()
    if math.isfinite(loss) and math.isfinite(norm):
        return
    raise NonFiniteError(
        f"step {report.step}: the loss is {loss:g} and the gradient norm {norm:g}; training stops, since every weight is "
        f"about to be NaN too. Lower optimizer.lr ({report.lr:g} in this step), lengthen lr_scheduler.warmup_steps, or look "
        'at the data of this step; training.on_nan = "ignore" goes on regardless'
    )


def build_finite_guard(facts: JobFacts) -> FiniteGuard:
    """For the core's plugin."""
    return FiniteGuard()
