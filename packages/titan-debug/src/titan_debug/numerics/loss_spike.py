"""Losses far above those before them, found as OLMo-core's stability monitor does (6 sigma over 128 steps)."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from titan_core.api.build_context import JobContext
from titan_core.api.errors import RunStopped
from titan_core.api.events import Finding, PendingUpdate, RunStart, StepReport
from titan_core.api.hookspecs import hookimpl
from titan_core.api.tools.late_reports import LateReports
from titan_debug.config import NumericsSection

log = logging.getLogger(__name__)

FEWEST = 32
"""Losses that are wanted before one can be called a spike (or the window, where it is shorter)."""


STATE = "loss_spike"
"""The name of what is kept in checkpoints."""


class LossSpikeError(RunStopped):
    """The loss jumped, and the config wants the run to end then."""


class SpikeDetector:
    """Mean and standard deviation of the last losses, spikes included: a loss that stays up is a level, and is reported
    once or a few times."""

    def __init__(self, window: int, sigma: float) -> None:
        self.losses: deque[float] = deque(maxlen=window)
        """The last ones."""
        self._sigma = sigma

    def add(self, loss: float) -> str | None:
        """Take a loss; what makes it a spike, in words, if it is one."""
        if not math.isfinite(loss):
            return None  # another guard's business
        told = None
        if len(self.losses) >= min(FEWEST, self.losses.maxlen or 0):
            mean = statistics.fmean(self.losses)
            # statistics.pstdev computes with fractions, which takes ten times as long.
            deviation = math.dist(self.losses, [mean] * len(self.losses)) / math.sqrt(len(self.losses))
            if loss > mean + self._sigma * deviation:
                away = f"{(loss - mean) / deviation:.1f} standard deviations above" if deviation else "above"
                told = f"the loss is {loss:.4f}, {away} the mean of the {len(self.losses)} before it ({mean:.4f})"
        self.losses.append(loss)
        return told


class LossSpikes(LateReports):
    """Warns and stops a step late on a GPU, without waiting for it; to leave out an update it has to wait for the loss."""

    def __init__(self, context: JobContext[NumericsSection]) -> None:
        section = context.section
        super().__init__()
        self._action: Literal["warn", "skip", "stop"] = section.spike_action  # type: ignore[assignment]  # there is none for "off"
        self._detector = SpikeDetector(section.spike_window, section.spike_sigma)
        self._run: RunStart | None = None

    @hookimpl
    def titan_save_state(self) -> dict[str, list[float]]:
        """The last losses: a resumed run judges the next one as if it had not stopped."""
        return {STATE: list(self._detector.losses)}

    @hookimpl
    def titan_restore_state(self, state: Mapping[str, Any]) -> None:
        """Those that the checkpoint has."""
        self._detector.losses.clear()
        self._detector.losses.extend(state.get(STATE, ()))

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        """Remember the run, for findings."""
        self._run = run

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> bool:
        """Whether to leave it out."""
        if self._action != "skip":
            return False
        told = self._detector.add(update.loss.item())
        if told is not None:
            self._tell(update.step, f"{told}; its update is left out")
        return told is not None

    def look(self, report: StepReport) -> None:
        """Warn or stop.

        Raises:
            LossSpikeError: to stop.
        """
        told = self._detector.add(report.loss.item()) if self._action != "skip" else None
        if told is None:
            return
        self._tell(report.step, told)
        if self._action == "stop":
            raise LossSpikeError(
                f'step {report.step}: {told}; numerics.spike_action = "stop" ends the run. Start again from an older '
                'checkpoint with a lower optimizer.lr or with spike_action = "skip", or raise numerics.spike_sigma'
            )

    def _tell(self, step: int, message: str) -> None:
        run = self._run
        if run is not None and run.world.rank == 0:
            log.warning("step %d: %s", step, message)
            run.report(Finding("loss spike", message, step))
