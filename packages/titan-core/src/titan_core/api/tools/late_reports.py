"""Reading the figures of steps without making a GPU wait."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from titan_core.api.events import PendingUpdate, StepReport
from titan_core.api.hookspecs import hookimpl
from titan_core.api.tools.device import HostCopy
from titan_core.api.world import World


class LateReports(ABC):
    """An observer that looks at each step's figures: at once on a CPU, where nothing is in flight; on a GPU when the next
    step has been issued, or before a checkpoint keeps what the step did. What is waited for is the end of the step that is
    looked at, not of the one that is under way."""

    def __init__(self) -> None:
        self._waiting: tuple[StepReport, HostCopy] | None = None

    @abstractmethod
    def look(self, report: StepReport) -> None:
        """What the observer does about a step, whose tensors are on the host."""

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Look at this step on a CPU, at the one before it on a GPU."""
        on_its_way = HostCopy([report.loss, report.rank_losses, report.grad_norm])
        if not report.loss.is_cuda:
            self._look(report, on_its_way)
            return
        before, self._waiting = self._waiting, (report, on_its_way)
        if before is not None:
            self._look(*before)

    @hookimpl
    def titan_flush(self, step: int) -> None:
        """Look at the step that was not looked at yet."""
        before, self._waiting = self._waiting, None
        if before is not None:
            self._look(*before)

    def _look(self, report: StepReport, on_its_way: HostCopy) -> None:
        loss, rank_losses, grad_norm = on_its_way.wait()
        self.look(replace(report, loss=loss, rank_losses=rank_losses, grad_norm=grad_norm))


def is_finite(step: PendingUpdate | StepReport, world: World) -> bool:
    """Whether loss and gradient norm are numbers, on all ranks; to be called by all of them."""
    finite = math.isfinite(step.loss.item()) and math.isfinite(step.grad_norm.item())
    if world.plan.diverging_replicas > 1:  # each copy of the weights has a gradient norm of its own
        return not world.max(torch.tensor(int(not finite))).item()
    return finite
