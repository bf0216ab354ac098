"""Parallel styles that torch does not have: what happens to a module's first input or to its output under TP.

torch's ``PrepareModuleInput`` wants the layouts of all inputs, and so the signature of a module that is only known by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from titan_parallel.torch_private import Style, wait_tensor


class GatherInput(Style):
    """The first argument comes in divided as ``layout`` says, and is seen whole: one all-gather for all layers that take it,
    and one reduce-scatter backward. ``cast`` is done to each rank's share of it."""

    def __init__(self, layout: Placement, cast: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self._layout, self._cast = layout, cast

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            first: Any = DTensor.from_local(arguments[0], mesh, [self._layout], run_check=False)
            if self._cast is not None:
                first = self._cast(first)
            return (first.redistribute(placements=[Replicate()]), *arguments[1:])

        module.register_forward_pre_hook(gather)
        return module


class SplitOutput(Style):
    """The output is computed whole on every rank, and leaves divided as ``layout`` says."""

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self._layout = layout

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def split(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            whole = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
            return whole.redistribute(placements=[self._layout]).to_local()

        module.register_forward_hook(split)
        return module


class DivideVocabulary(Style):
    """Of the layer that gives the logits each rank has some of the output features. Within, the logits are a DTensor;
    ``logits`` is how they leave. A loss that was computed within leaves as it is."""

    def __init__(self, hidden: Placement, logits: Placement) -> None:
        super().__init__()
        self._hidden, self._logits = hidden, logits

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def divide(name: str, child: nn.Module, device_mesh: DeviceMesh) -> None:
            for own, parameter in list(child.named_parameters(recurse=False)):
                divided = nn.Parameter(distribute_tensor(parameter, device_mesh, [Shard(0)]), parameter.requires_grad)
                child.register_parameter(own, divided)

        def leave(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            if isinstance(output, DTensor):
                output = output.redistribute(placements=[self._logits]).to_local()
            return output

        distribute_module(module, mesh, divide)
        parallelize_module(module, mesh, GatherInput(self._hidden))
        module.register_forward_hook(leave)
        return module


class DivideColumns(Style):
    """torch's ``ColwiseParallel``, but for inputs that are plain tensors. Inside of a region each rank computes an addend of
    the gradient of what all ranks have; torch's style would give each of them the sum, which would then be counted once a
    rank."""

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def share(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            first = arguments[0]
            if isinstance(first, DTensor):
                return None
            whole = _ShareOfGradient.apply(first, mesh.size())
            return (DTensor.from_local(whole, mesh, [Replicate()], run_check=False), *arguments[1:])

        module.register_forward_pre_hook(share)  # before ColwiseParallel's own, which leaves DTensors as they are
        return parallelize_module(module, mesh, ColwiseParallel())


class _ShareOfGradient(torch.autograd.Function):
    """The identity, whose gradient, the same on ``ranks`` ranks, becomes an equal addend on each."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


class WaitForOutput(Style):
    """The output is no collective still in flight."""

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda module, arguments, output: wait_tensor(output))
        return module
