"""Where a NaN came from: the first module whose output is not finite, or else the first gradient."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titan_core.api.build_context import JobContext
from titan_core.api.events import Finding, PendingUpdate, RunStart
from titan_core.api.hookspecs import hookimpl
from titan_core.api.tools.late_reports import is_finite
from titan_debug.config import NumericsSection
from titan_debug.numerics.replay import local_tensors, named_gradients, place_in_model, replay

log = logging.getLogger(__name__)

MOST = 3
"""How many bad steps of a run are looked into: where they are skipped or ignored, there may be thousands."""


@dataclass(frozen=True)
class Bad:
    """The first thing on a rank that is not finite."""

    place: tuple[int, int]
    """Where it stands in the whole model, since a bad output makes all later ones bad, on whatever rank they are."""
    call: int
    """How many modules the rank had called before."""
    what: str


class NanLocator:
    """Looks when a step's loss or gradient norm is not finite, before the update spreads it to every weight."""

    def __init__(self, context: JobContext[NumericsSection]) -> None:
        self._run: RunStart | None = None
        self._left = MOST

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        """Remember the model's parts, and the run, for findings."""
        self._run = run

    @hookimpl(tryfirst=True)
    def titan_before_update(self, update: PendingUpdate) -> None:
        """Look, where there is something to look for."""
        run = self._run
        assert run is not None
        if is_finite(update, run.world) or not self._left:
            return
        self._left -= 1
        message = f"step {update.step}: {self._locate(run, update)}"
        if run.world.rank == 0:
            log.warning("%s", message)
            run.report(Finding("not finite", message, update.step))

    def _locate(self, run: RunStart, update: PendingUpdate) -> str:
        calls: list[str] = []
        finite: list[Tensor] = []

        def look(name: str, module: nn.Module, outputs: list[Tensor]) -> None:
            for output in outputs:
                calls.append(name)
                finite.append(torch.isfinite(output).all())

        loss = replay(update, run.parts, look)
        found: list[Bad | None] = run.world.gather(self._first_output(calls, finite, run))
        first = _first(found)
        if first is not None:
            return f"the first output that is not finite is that {first}"
        losses = run.world.gather(math.isfinite(loss.item()))
        if not all(losses):
            return f"all modules' outputs are finite, but not the loss of them, on rank {losses.index(False)}"
        if not math.isfinite(update.loss.item()):
            return (
                "a second forward pass is finite throughout, and the first was not: the same numbers gave others, which "
                "points to hardware, or to code that is not deterministic"
            )
        first = _first(run.world.gather(_last_gradient(run)), backward=True)
        if first is not None:
            return (
                "all outputs of a second forward pass are finite; the first gradient that is not, in the order of backward, "
                f"is that {first}"
            )
        return (
            "a second forward pass is finite throughout, and so is each element of the gradients: the sum of their squares "
            "overflows"
        )

    def _first_output(self, calls: list[str], finite: list[Tensor], run: RunStart) -> Bad | None:
        good = torch.stack(finite).tolist() if finite else []
        if False not in good:
            return None
        layout = run.parts[0].layout
        bad = (call for call, finite_there in enumerate(good) if not finite_there)
        call = min(bad, key=lambda call: (place_in_model(calls[call], layout), call))
        name = calls[call]
        weights = (
            f"; its parameter {parameter} is not finite itself, so an earlier step went wrong"
            for part in run.parts
            for parameter, tensor in part.module.named_parameters()
            if parameter.rpartition(".")[0] == name and not _is_finite(tensor)
        )
        return Bad(place_in_model(name, layout), call, f"of {name}{next(weights, '')}")


def _last_gradient(run: RunStart) -> Bad | None:
    """Of this rank, in the model's order; backward comes by the last one first."""
    layout = run.parts[0].layout
    bad = [
        Bad(place_in_model(name, layout), number, f"of {name}")
        for number, (name, tensor) in enumerate(named_gradients(run.parts))
        if not _is_finite(tensor)
    ]
    return max(bad, key=lambda one: (one.place, one.call), default=None)


def _is_finite(tensor: Tensor) -> bool:
    return all(bool(torch.isfinite(one).all()) for one in local_tensors(tensor))


def _first(found: list[Bad | None], backward: bool = False) -> str | None:
    """The first of what ranks have found, with the ranks that found it."""
    there = [one for one in found if one is not None]
    if not there:
        return None
    first = (max if backward else min)(there, key=lambda one: (one.place, one.call))
    ranks = [str(rank) for rank, one in enumerate(found) if one == first]
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks[:8])}{' and others' * (len(ranks) > 8)}"
    what, semicolon, more = first.what.partition(";")
    return f"{what} on {where}{semicolon}{more}"
