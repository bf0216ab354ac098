"""Garbage collection at the same steps on all ranks."""

from __future__ import annotations

import gc

from titan_core.api import JobContext, StepReport, hookimpl
from titan_launch.config import GarbageKeys


class GarbageCollection:
    """Collects Python's garbage every ``training.gc_freq`` steps.

    Python's own collector runs on each rank at another moment, and all ranks wait for the one that it interrupts. Whatever
    exists after the first step (modules, the model, compiled code) is exempt, so a collection takes less than a millisecond.
    """

    def __init__(self, context: JobContext[GarbageKeys]) -> None:
        self._freq = context.section.gc_freq
        self._frozen = False

    @hookimpl(trylast=True)
    def titan_train_start(self) -> None:
        """Stop Python's own collections. When the job is over, the trainer starts them again and unfreezes everything."""
        gc.disable()

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Collect all generations, because nothing else would collect what survives a younger one."""
        if not self._frozen or report.step % self._freq == 0:
            gc.collect()
        if not self._frozen:
            gc.freeze()
            self._frozen = True
