"""Reads the values of steps without stalling a GPU."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch

from titan_core.api.hookspecs import hookimpl
from titan_core.api.observe.events import PendingUpdate, StepReport
from titan_core.api.parallel.world import World


class DeferredReports(ABC):
    """An observer that reads each step's values. On a CPU, it reads them immediately, because nothing is in flight. On a
    GPU, it reads them after the next step was launched, or before a checkpoint saves the step's result, so it waits for the
    step that it reads and not for the current one."""

    def __init__(self) -> None:
        self._waiting: tuple[StepReport, HostCopy] | None = None

    @abstractmethod
    def process(self, report: StepReport) -> None:
        """Process the report of a step, whose tensors are on the host."""

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Process this step's report on a CPU, the preceding step's on a GPU."""
        # Flags are copied as what they usually are, true: on a simulated device every flag is.
        updated = [~report.skipped] if isinstance(report.skipped, torch.Tensor) else []
        copies = HostCopy([report.loss, report.rank_losses, report.grad_norm, *updated])
        if not in_flight(report.loss):
            self._look(report, copies)
            return
        before, self._waiting = self._waiting, (report, copies)
        if before is not None:
            self._look(*before)

    @hookimpl
    def titan_flush(self, step: int) -> None:
        """Process the report that is still pending, if any."""
        before, self._waiting = self._waiting, None
        if before is not None:
            self._look(*before)

    def _look(self, report: StepReport, copies: HostCopy) -> None:
        loss, rank_losses, grad_norm, *updated = copies.wait()
        skipped = not updated[0] if updated else report.skipped
        self.process(replace(report, loss=loss, rank_losses=rank_losses, grad_norm=grad_norm, skipped=skipped))


def in_flight(tensor: torch.Tensor) -> bool:
    """Whether the device may not have computed ``tensor`` yet, so that reading it may wait."""
    return tensor.is_cuda


def any_of(answers: Sequence[bool | torch.Tensor]) -> bool | torch.Tensor:
    """Return whether one of the observers' ``answers``, bools and 0-d bool tensors, is true; a tensor if that is in
    flight."""
    flags = [answer for answer in answers if isinstance(answer, torch.Tensor)]
    plain = any(answer for answer in answers if isinstance(answer, bool))
    if plain or not flags:
        return plain
    flag = flags[0] if len(flags) == 1 else torch.stack(flags).any()
    return flag if in_flight(flag) else bool(flag)


def finite(update: PendingUpdate, world: World) -> torch.Tensor:
    """Return whether loss and gradient norm are finite on all ranks: a 0-d bool on the device, the same on all ranks. All
    ranks must call it."""
    here = torch.isfinite(torch.stack([update.loss, update.grad_norm])).all()
    if world.plan.diverging_replicas > 1:  # each replica has its own gradient norm
        return world.max((~here).int()) == 0
    return here


def is_finite(step: PendingUpdate | StepReport, world: World) -> bool:
    """Whether loss and gradient norm are finite on all ranks. All ranks must call it."""
    finite = math.isfinite(step.loss.item()) and math.isfinite(step.grad_norm.item())
    if world.plan.diverging_replicas > 1:  # each replica has its own gradient norm
        return not world.max(torch.tensor(int(not finite))).item()
    return finite


class HostCopy:
    """Asynchronous copies of tensors to the host. The copies start on construction; :meth:`wait` does not wait for work that
    is queued on the device afterwards."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # GPU tensors are copied to pinned memory; CPU tensors are not copied.
        self._tensors = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
        self._done = torch.cuda.Event() if any(tensor.is_cuda for tensor in tensors) else None
        if self._done is not None:
            self._done.record()

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors on the host, once the copies are complete."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors
