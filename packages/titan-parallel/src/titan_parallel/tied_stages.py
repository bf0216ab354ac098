"""Parameters that are tied across the stages of a pipeline, such as the embedding and the output layer.

One stage has the original, and each other stage a copy (:attr:`titan_core.api.ModelPart.copies`). Copies receive the
original's value before each run of the schedule, and the original their gradients after it. All else, from the gradient norm
to optimizers and checkpoints, knows only the original: it is counted and updated once, and a copy cannot drift away from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_core.api import ModelLayout, ModelPart, TrainingContext, UserError
from titan_core.toolkit.simulation import current_simulation
from titan_parallel.config import PipelineKeys
from titan_parallel.pipeline_plan import PipelinePlan, unit_of
from titan_parallel.torch_private import local_tensor, registered_parameter


def ties_within(layout: ModelLayout, stage: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the ties between parameters of a ``stage``, and its copies of other stages' parameters, as
    :attr:`ModelLayout.tied` and :attr:`ModelPart.copies` hold them."""
    first: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, source in layout.tied.items():
        if unit_of(name, layout) in stage:
            present = source if unit_of(source, layout) in stage else first.setdefault(source, name)
            if present != name:
                tied[name] = present
    return tied, {name: source for source, name in first.items()}


@dataclass(frozen=True)
class _Tie:
    """A copy of a parameter and its original, of which this rank has at least one."""

    original: Callable[[], nn.Parameter] | None
    copy: Callable[[], nn.Parameter] | None
    """The parameter; ``None`` if another rank has it."""
    peer: int
    """The rank along ``pp`` that has the other one."""


class TiedStages:
    """Keeps this rank's part of ties across stages."""

    def __init__(self, parts: Mapping[int, ModelPart], plan: PipelinePlan, context: TrainingContext[PipelineKeys]) -> None:
        """
        Args:
            parts: this rank's stages, by number.

        Raises:
            UserError: the parameters of a tie are divided in different ways.
        """
        self._group, self._device = context.mesh["pp"].get_group(), context.device
        layout = context.job.model.layout
        self._ties: list[_Tie] = []
        for number, stage in enumerate(plan.stages):
            for copy, original in ties_within(layout, stage)[1].items():
                owner = next(other for other, names in enumerate(plan.stages) if unit_of(original, layout) in names)
                first, second = _reader(parts.get(owner), original), _reader(parts.get(number), copy)
                if first is not None or second is not None:
                    tie = _Tie(first, second, plan.rank_of[number if second is None else owner])
                    if current_simulation() is None:
                        self._require_alike(tie, copy, original)
                    self._ties.append(tie)

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Give copies the value of their original, and no gradient."""
        for tie in self._ties:
            source = None if tie.original is None else _local(tie.original())
            target = None if tie.copy is None else _local(tie.copy())
            self._pass(tie, source, target, add=False)
            if tie.copy is not None:
                tie.copy().grad = None

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients of copies to those of their originals. Copies keep none."""
        for tie in self._ties:
            one = tie.original or tie.copy
            assert one is not None
            if one().requires_grad:
                source = None if tie.copy is None else _gradient(tie.copy())
                target = None if tie.original is None else _gradient(tie.original())
                self._pass(tie, source, target, add=True)
            if tie.copy is not None:
                tie.copy().grad = None

    def _pass(self, tie: _Tie, source: Tensor | None, target: Tensor | None, add: bool) -> None:
        """Copy or add ``source`` to ``target``, of which another rank may have one."""
        if target is None:
            assert source is not None
            self._exchange(tie, (dist.isend, source.to(self._device).contiguous()))
            return
        if source is None:
            source = torch.empty(target.shape, dtype=target.dtype, device=self._device)
            self._exchange(tie, (dist.irecv, source))
        source = source.to(target.device)
        target.add_(source) if add else target.copy_(source)

    def _exchange(self, tie: _Tie, *operations: tuple[Callable[..., Any], Tensor]) -> None:
        """Send and receive at once, as the stages do: NCCL then uses their communicator."""
        calls = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=tie.peer)
            for operation, tensor in operations
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()

    def _require_alike(self, tie: _Tie, copy: str, original: str) -> None:
        """Require this rank's shards of the two parameters to have one shape.

        Raises:
            UserError: they have not; on all their ranks.
        """
        shapes = [_local(read()).shape for read in (tie.original, tie.copy) if read is not None]
        if len(shapes) == 1:
            own = torch.tensor(shapes[0], device=self._device)
            other = torch.empty_like(own)
            self._exchange(tie, (dist.isend, own), (dist.irecv, other))
            shapes.append(torch.Size(other.tolist()))
        if shapes[0] != shapes[1]:
            why = (
                f"ties {copy!r} to {original!r}, but a rank's shares of the two are {list(shapes[0])} and {list(shapes[1])}"
            )
            fix = "divide both alike, or set parallelism.pipeline_parallel_degree = 1"
            raise UserError.one("the model's layout", why, fix)


def _reader(part: ModelPart | None, name: str) -> Callable[[], nn.Parameter] | None:
    """Return a function that returns the parameter ``name`` of ``part``: FSDP replaces it from time to time."""
    if part is None:
        return None
    owner, _, leaf = name.rpartition(".")
    return partial(_registered, part.module.get_submodule(owner), leaf)


def _registered(module: nn.Module, leaf: str) -> nn.Parameter:
    parameter = registered_parameter(module, leaf)
    assert parameter is not None  # the layout names it
    return parameter


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of the gradient; zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return _local(parameter.grad)
