"""What happens when a run's loss or gradient norm is no number any more: stop, leave out the update, or say so."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from titan_core.api.build_context import JobContext
from titan_core.api.errors import RunStopped
from titan_core.api.events import Finding, PendingUpdate, RunStart, StepReport
from titan_core.api.hookspecs import hookimpl
from titan_core.api.sections import TrainingSection
from titan_core.api.tools.late_reports import LateReports, is_finite
from titan_core.api.world import World

log = logging.getLogger(__name__)

MOST_SKIPPED = 10
"""Bad steps in a row after which leaving them out is no way on."""


STATE = "finite_guard"
"""The name of what is kept in checkpoints."""


class NonFiniteError(RunStopped):
    """The loss or the gradient norm is NaN or infinite."""


class FiniteGuard(LateReports):
    """To stop or to warn, it looks late, so that no GPU is waited for. To leave out an update, it must know before."""

    def __init__(self, context: JobContext[TrainingSection]) -> None:
        super().__init__()
        self._action = context.section.on_nan
        self._run: RunStart | None = None
        self._skipped = 0  # in a row

    @hookimpl
    def titan_save_state(self) -> dict[str, int]:
        """So that being restarted again and again does not hide that nothing is learned."""
        return {STATE: self._skipped}

    @hookimpl
    def titan_restore_state(self, state: Mapping[str, Any]) -> None:
        """As it was."""
        self._skipped = state.get(STATE, 0)

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        """Remember the run, for findings."""
        self._run = run

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> bool:
        """Whether to leave it out.

        Raises:
            NonFiniteError: too many in a row.
        """
        if self._action != "skip" or is_finite(update, self._world()):
            self._skipped = 0
            return False
        self._skipped += 1
        if self._skipped == MOST_SKIPPED:
            raise NonFiniteError(
                f"{_figures(update)}; training stops, since this is the {MOST_SKIPPED}th such step in a row. Start again "
                'from an older checkpoint with a lower optimizer.lr, or with training.on_nan = "stop" to see the first one'
            )
        self._tell(update.step, f"{_figures(update)}; its update is left out")
        return True

    def look(self, report: StepReport) -> None:
        """Warn or stop.

        Raises:
            NonFiniteError: to stop.
        """
        if self._action == "skip" or is_finite(report, self._world()):
            return
        if self._action == "warn":
            self._tell(report.step, _figures(report))
            return
        raise NonFiniteError(
            f"{_figures(report)}; training stops, since every weight is about to be NaN too. Lower optimizer.lr "
            f"({report.lr:g} in this step), lengthen lr_scheduler.warmup_steps, or look at the data of this step; "
            'training.on_nan = "skip" leaves out the updates of such steps, "warn" and "ignore" continue regardless'
        )

    def _tell(self, step: int, message: str) -> None:
        log.warning("%s", message)
        if self._run is not None:
            self._run.report(Finding("not finite", message, step))

    def _world(self) -> World:
        assert self._run is not None
        return self._run.world


def _figures(step: PendingUpdate | StepReport) -> str:
    losses = step.rank_losses.tolist()
    bad = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    where = (
        f" (that of data rank {', '.join(bad[:8])}{' and others' * (len(bad) > 8)})" if 0 < len(bad) < len(losses) else ""
    )
    loss, norm = step.loss.item(), step.grad_norm.item()
    elsewhere = " here, and not finite in another copy of the weights" if math.isfinite(loss) and math.isfinite(norm) else ""
    return f"step {step.step}: the loss is {loss:g}{where} and the gradient norm {norm:g}{elsewhere}"
