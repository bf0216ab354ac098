"""Garbage collection at the same steps on all ranks."""

from __future__ import annotations

import gc
from types import TracebackType

from titan_core.api.events import StepReport
from titan_core.api.hookspecs import hookimpl


class GarbageCollection:
    """Collects Python's garbage every ``freq`` steps within the ``with`` block; 0 leaves it to Python.

    Python's own collector runs on each rank at another moment, and all ranks wait for the one that it interrupts. Whatever
    exists after the first step (modules, the model, compiled code) is exempt: a collection then takes about a millisecond.
    """

    def __init__(self, freq: int) -> None:
        self._freq = freq
        self._enabled = self._frozen = False

    def __enter__(self) -> GarbageCollection:
        self._enabled = gc.isenabled()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._frozen:
            gc.unfreeze()
        if self._enabled:
            gc.enable()

    @hookimpl(trylast=True)
    def titan_train_start(self) -> None:
        """Free what set-up has left behind, so that it does not add to the memory of the first step."""
        if self._freq:
            gc.collect()
            gc.disable()

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Collect all generations: nobody else would collect what survives a younger one."""
        if self._freq and (not self._frozen or report.step % self._freq == 0):
            gc.collect()
        if self._freq and not self._frozen:
            gc.freeze()
            self._frozen = True
