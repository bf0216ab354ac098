"""Detects losses far above the preceding ones by the method of OLMo-core's stability monitor (6 sigma over 128 steps)."""

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
from titan_core.api.tools.deferred_reports import DeferredReports
from titan_debug.config import NumericsSection

log = logging.getLogger(__name__)

FEWEST = 32
"""Number of losses needed before a spike can be detected; less if the window is shorter."""


STATE = "loss_spike"
"""Key of the state in checkpoints."""


class LossSpikeError(RunStopped):
    """The loss spiked, and ``numerics.spike_action`` is ``"stop"``."""


class SpikeDetector:
    """Compares each loss with the mean and standard deviation of the last ones. These include spikes, so a loss that stays
    high becomes the new level and is reported only a few times."""

    def __init__(self, window: int, sigma: float) -> None:
        self.losses: deque[float] = deque(maxlen=window)
        """The last losses, oldest first."""
        self._sigma = sigma

    def add(self, loss: float) -> str | None:
        """Add a loss. Return a message if it is a spike."""
        if not math.isfinite(loss):
            return None  # handled by training.on_nan
        message = None
        if len(self.losses) >= min(FEWEST, self.losses.maxlen or 0):
            mean = statistics.fmean(self.losses)
            # statistics.pstdev uses fractions, which takes ten times as long.
            deviation = math.dist(self.losses, [mean] * len(self.losses)) / math.sqrt(len(self.losses))
            if loss > mean + self._sigma * deviation:
                away = f"{(loss - mean) / deviation:.1f} standard deviations above" if deviation else "above"
                message = f"the loss is {loss:.4f}, {away} the mean of the preceding {len(self.losses)} losses ({mean:.4f})"
        self.losses.append(loss)
        return message


class LossSpikes(DeferredReports):
    """Handles loss spikes. On a GPU it warns or stops one step late so that the host does not wait; to skip an update it
    must wait for the loss."""

    def __init__(self, context: JobContext[NumericsSection]) -> None:
        section = context.section
        super().__init__()
        self._action: Literal["warn", "skip", "stop"] = section.spike_action  # type: ignore[assignment]  # inactive if "off"
        self._detector = SpikeDetector(section.spike_window, section.spike_sigma)
        self._run: RunStart | None = None

    @hookimpl
    def titan_save_state(self) -> dict[str, list[float]]:
        """Save the last losses so that a resumed run judges the next loss as an uninterrupted run would."""
        return {STATE: list(self._detector.losses)}

    @hookimpl
    def titan_restore_state(self, state: Mapping[str, Any]) -> None:
        """Restore the losses from a checkpoint."""
        self._detector.losses.clear()
        self._detector.losses.extend(state.get(STATE, ()))

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        """Keep the run for findings."""
        self._run = run

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> bool:
        """Return whether to skip the update."""
        if self._action != "skip":
            return False
        message = self._detector.add(update.loss.item())
        if message is not None:
            self._report(update.step, f"{message}; skipping its update")
        return message is not None

    def process(self, report: StepReport) -> None:
        """Warn of a spike or stop the run.

        Raises:
            LossSpikeError: the loss is a spike and ``spike_action`` is ``"stop"``.
        """
        message = self._detector.add(report.loss.item()) if self._action != "skip" else None
        if message is None:
            return
        self._report(report.step, message)
        if self._action == "stop":
            raise LossSpikeError(
                f'step {report.step}: {message}; stopped because numerics.spike_action = "stop". Resume from an older '
                'checkpoint with a lower optimizer.lr or with spike_action = "skip", or raise numerics.spike_sigma'
            )

    def _report(self, step: int, message: str) -> None:
        run = self._run
        if run is not None and run.world.rank == 0:
            log.warning("step %d: %s", step, message)
            run.report(Finding("loss spike", message, step))
