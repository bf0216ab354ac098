"""Parallel styles that torch does not have: what happens to a module's first input or to its output under TP.

torch's ``PrepareModuleInput`` wants the layouts of all inputs, and so the signature of a module that is only known by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle


class GatherInput(ParallelStyle):
    """The first argument comes in divided as ``layout`` says, and is seen whole: one all-gather for all layers that take it,
    and one reduce-scatter backward. ``cast`` is done to each rank's share of it."""

    def __init__(self, layout: Placement, cast: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self._layout, self._cast = layout, cast

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            first: Any = DTensor.from_local(arguments[0], device_mesh, [self._layout], run_check=False)
            if self._cast is not None:
                first = self._cast(first)
            return (first.redistribute(placements=[Replicate()]), *arguments[1:])

        module.register_forward_pre_hook(gather)
        return module


class SplitOutput(ParallelStyle):
    """The output is computed whole on every rank, and leaves divided as ``layout`` says."""

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self._layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            whole = DTensor.from_local(output, device_mesh, [Replicate()], run_check=False)
            return whole.redistribute(placements=[self._layout]).to_local()

        module.register_forward_hook(split)
        return module


class DivideVocabulary(ParallelStyle):
    """Of the layer that gives the logits each rank has some of the output features. Within, the logits are a DTensor;
    ``logits`` is how they leave. A loss that was computed within leaves as it is."""

    def __init__(self, hidden: Placement, logits: Placement) -> None:
        super().__init__()
        self._hidden, self._logits = hidden, logits

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(name: str, child: nn.Module, mesh: DeviceMesh) -> None:
            for own, parameter in list(child.named_parameters(recurse=False)):
                divided = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]), parameter.requires_grad)
                child.register_parameter(own, divided)

        def leave(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            if isinstance(output, DTensor):
                output = output.redistribute(placements=[self._logits]).to_local()
            return output

        distribute_module(module, device_mesh, divide)
        GatherInput(self._hidden)._apply(module, device_mesh)
        module.register_forward_hook(leave)
        return module


class DivideColumns(ColwiseParallel):
    """torch's, but for inputs that are plain tensors. Inside of a region each rank computes an addend of the gradient of
    what all ranks have; torch's style would give each of them the sum, which would then be counted once a rank."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh
    ) -> Any:
        first = inputs[0]
        if isinstance(first, DTensor):
            return first
        return DTensor.from_local(
            _ShareOfGradient.apply(first, device_mesh.size()), device_mesh, [Replicate()], run_check=False
        )


class _ShareOfGradient(torch.autograd.Function):
    """The identity, whose gradient, the same on ``ranks`` ranks, becomes an equal addend on each."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


class WaitForOutput(ParallelStyle):
    """The output is no collective still in flight."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda module, arguments, output: wait_tensor(output))
        return module
