"""Locates the origin of a NaN: the first module whose output is not finite, or else the first such gradient."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan_core.api import Finding, JobContext, PendingUpdate, Run, hookimpl
from titan_core.api.config.sections import TrainingSection
from titan_core.api.observe.deferred_reports import finite, in_flight
from titan_core.toolkit.device import HostCopy
from titan_core.toolkit.text import ranks
from titan_debug.config import NumericsSection
from titan_debug.numerics.replay import local_tensors, named_gradients, place_in_model, replay

log = logging.getLogger(__name__)

MOST = 3
"""Number of bad steps to investigate in a run. If bad steps are skipped or ignored, there may be thousands."""


@dataclass(frozen=True)
class Bad:
    """The first output or gradient on a rank that is not finite."""

    place: tuple[int, int]
    """Position in the whole model: a bad output makes all later outputs bad, on every rank."""
    call: int
    """Number of outputs (or gradients) that precede it on the rank."""
    name: str
    """The module or parameter, with a remark after a semicolon if there is one."""


class NanLocator:
    """Investigates a step whose loss or gradient norm is not finite, with the weights of that step.

    On a GPU it looks one step late, so that the host does not wait for the device. That is possible because the device skips
    the update of a bad step (``training.on_nan`` = "stop" or "skip"): until the next update the weights are still those of
    the step. If bad updates are not skipped, the locator has to wait for the figures of each step before its update.
    """

    def __init__(self, context: JobContext[NumericsSection]) -> None:
        self._run: Run | None = None
        self._left = MOST
        self._skipped = context.job.section(TrainingSection).on_nan in ("stop", "skip")
        self._waiting: tuple[PendingUpdate, HostCopy] | None = None

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Keep the model's parts and the run for findings."""
        self._run = run

    @hookimpl(tryfirst=True)
    def titan_before_update(self, update: PendingUpdate) -> None:
        """Locate the origin if the loss or gradient norm of this step, or of the preceding one, is not finite."""
        assert self._run is not None
        self._look_back()
        if not self._left:
            return
        good = finite(update, self._run.world)
        if self._skipped and in_flight(good):
            self._waiting = update, HostCopy([good])
        elif not good:
            self._investigate(update, nullcontext)

    @hookimpl(tryfirst=True)
    def titan_flush(self, step: int) -> None:
        """Look at the last step, before the guard ends the run because of it."""
        self._look_back()

    def _look_back(self) -> None:
        """Investigate the preceding step if it was bad. Its gradients are gone."""
        before, self._waiting = self._waiting, None
        if before is not None and not before[1].wait()[0]:
            self._investigate(before[0], before[0].repeat_backward)

    def _investigate(self, update: PendingUpdate, gradients: Callable[[], AbstractContextManager[None]]) -> None:
        run = self._run
        assert run is not None
        self._left -= 1
        message = f"step {update.step}: {self._locate(run, update, gradients)}"
        if run.world.rank == 0:
            log.warning("%s", message)
            run.report(Finding("not finite", message, update.step))

    def _locate(self, run: Run, update: PendingUpdate, gradients: Callable[[], AbstractContextManager[None]]) -> str:
        """
        Args:
            gradients: returns a context within which the parameters have the gradients of the step.
        """
        calls: list[str] = []
        good: list[Tensor] = []

        def on_output(name: str, module: nn.Module, outputs: list[Tensor]) -> None:
            for output in outputs:
                calls.append(name)
                good.append(torch.isfinite(output).all())

        loss = replay(update, run.parts, on_output)
        found: list[Bad | None] = run.world.gather(self._first_output(calls, good, run))
        first = _first(found)
        if first is not None:
            return f"the first output that is not finite is that of {first}"
        losses = run.world.gather(math.isfinite(loss.item()))
        if not all(losses):
            return f"the outputs of all modules are finite, but the loss on rank {losses.index(False)} is not"
        if not math.isfinite(update.loss.item()):
            return (
                "the loss is not finite, but repeating the forward pass gives finite values throughout: suspect faulty "
                "hardware or non-deterministic code"
            )
        with gradients():
            first = _first(run.world.gather(_last_gradient(run)), backward=True)
        if first is not None:
            return (
                "repeating the forward pass gives finite outputs; the first gradient in the order of backward that is not "
                f"finite is that of {first}"
            )
        return (
            "repeating the forward pass gives finite outputs, and every gradient element is finite: their sum of squares "
            "overflows"
        )

    def _first_output(self, calls: list[str], flags: list[Tensor], run: Run) -> Bad | None:
        good = torch.stack(flags).tolist() if flags else []
        if False not in good:
            return None
        layout = run.parts[0].layout
        bad = (call for call, finite_there in enumerate(good) if not finite_there)
        call = min(bad, key=lambda call: (place_in_model(calls[call], layout), call))
        name = calls[call]
        remarks = (
            f"; its parameter {parameter} is already not finite, so an earlier step caused this"
            for part in run.parts
            for parameter, tensor in part.named_parameters()
            if parameter.rpartition(".")[0] == name and not _is_finite(tensor)
        )
        return Bad(place_in_model(name, layout), call, f"{name}{next(remarks, '')}")


def _last_gradient(run: Run) -> Bad | None:
    """Return this rank's last bad gradient in the model's order, which backward computes first."""
    layout = run.parts[0].layout
    bad = [
        Bad(place_in_model(name, layout), number, name)
        for number, (name, tensor) in enumerate(named_gradients(run.parts))
        if not _is_finite(tensor)
    ]
    return max(bad, key=lambda gradient: (gradient.place, gradient.call), default=None)


def _is_finite(tensor: Tensor) -> bool:
    return all(bool(torch.isfinite(local).all()) for local in local_tensors(tensor))


def _first(found: list[Bad | None], backward: bool = False) -> str | None:
    """Return the first of the ranks' findings, with the ranks that share it."""
    present = [bad for bad in found if bad is not None]
    if not present:
        return None
    first = (max if backward else min)(present, key=lambda bad: (bad.place, bad.call))
    sharing = ranks(rank for rank, bad in enumerate(found) if bad == first)
    name, semicolon, remark = first.name.partition(";")
    return f"{name} on {sharing}{semicolon}{remark}"
