"""Reaction to a loss or gradient norm that is not finite: stop the run, skip the update or warn."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from titan_core.api import DeferredReports, Finding, JobContext, PendingUpdate, Run, StepReport, World, hookimpl
from titan_core.api.config.sections import TrainingSection
from titan_core.api.observe.deferred_reports import finite, is_finite
from titan_core.toolkit.errors import NumericsStop

log = logging.getLogger(__name__)

MOST_SKIPPED = 10
"""Number of successive skipped updates that ends the run."""

STATE = "finite_guard"
"""Name of the guard's state in checkpoints."""


class NonFiniteError(NumericsStop):
    """The loss or the gradient norm is NaN or infinite."""


class FiniteGuard(DeferredReports):
    """The device decides whether to skip an update, and the guard reads reports late, so that the host does not wait for a
    GPU. A step that stops the run is skipped as well: its weights then show the cause
    (:mod:`titan_debug.numerics.locate_nan`), and no checkpoint or observer can see bad ones."""

    def __init__(self, context: JobContext[TrainingSection]) -> None:
        super().__init__()
        self._action = context.section.on_nan
        self._run: Run | None = None
        self._skipped = 0  # successive skipped updates

    @hookimpl
    def titan_save_state(self) -> dict[str, int]:
        """Save the count, so that restarts do not hide a run that learns nothing."""
        return {STATE: self._skipped}

    @hookimpl
    def titan_restore_state(self, state: Mapping[str, Any]) -> None:
        """Restore the count."""
        self._skipped = state.get(STATE, 0)

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Remember the run, to report findings."""
        self._run = run

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> Tensor | None:
        """Return whether to skip the update."""
        return ~finite(update, self._world()) if self._action in ("stop", "skip") else None

    def process(self, report: StepReport) -> None:
        """Warn, stop or count.

        Raises:
            NonFiniteError: a figure is not finite and ``training.on_nan`` is ``"stop"``, or the updates of
                :data:`MOST_SKIPPED` successive steps were skipped.
        """
        # Bad steps are always skipped, unless to warn. Ranks are compared (by ``is_finite``) only if need be.
        if not (report.skipped or self._action == "warn") or is_finite(report, self._world()):
            self._skipped = 0
            return
        match self._action:
            case "warn":
                self._report(report.step, _figures(report))
            case "stop":
                raise NonFiniteError(
                    f"{_figures(report)}; training stops, because its update would make every weight NaN. Lower "
                    f"optimizer.lr ({report.lr:g} in this step), increase lr_scheduler.warmup_steps, or inspect the data of "
                    'this step; training.on_nan = "skip" skips the updates of such steps, "warn" and "ignore" continue '
                    "regardless"
                )
            case "skip":
                self._skipped += 1
                if self._skipped == MOST_SKIPPED:
                    raise NonFiniteError(
                        f"{_figures(report)}; training stops, because this is the {MOST_SKIPPED}th such step in a row. "
                        'Resume from an older checkpoint with a lower optimizer.lr, or with training.on_nan = "stop" to '
                        "see the first such step"
                    )
                self._report(report.step, f"{_figures(report)}; its update is skipped")

    def _report(self, step: int, message: str) -> None:
        log.warning("%s", message)
        if self._run is not None:
            self._run.report(Finding("not finite", message, step))

    def _world(self) -> World:
        assert self._run is not None
        return self._run.world


def _figures(step: StepReport) -> str:
    losses = step.rank_losses.tolist()
    bad = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    where = f" (on data rank {', '.join(bad[:8])}{' and others' * (len(bad) > 8)})" if 0 < len(bad) < len(losses) else ""
    loss, norm = step.loss.item(), step.grad_norm.item()
    elsewhere = (
        " here, but not finite in another replica of the weights" if math.isfinite(loss) and math.isfinite(norm) else ""
    )
    return f"step {step.step}: the loss is {loss:g}{where} and the gradient norm {norm:g}{elsewhere}"
