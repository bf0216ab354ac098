"""Parallel styles that torch lacks: they redistribute a module's first input or its output under tensor parallelism.

torch's ``PrepareModuleInput`` needs the layouts of all inputs, hence the module's signature, which a layout does not give.
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
    """Gather the first input: one all-gather for all layers that read it, and one reduce-scatter in backward."""

    def __init__(self, layout: Placement, cast: Callable[[Tensor], Tensor] | None = None) -> None:
        """
        Args:
            layout: placement of the input as it arrives.
            cast: applied to each rank's shard before it is gathered.
        """
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
    """Split an output that every rank computes in full, into shards placed by ``layout``."""

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
    """Shard the layer that computes the logits over its output features, the vocabulary.

    A loss that the layer computes from its logits, which are a DTensor there, is returned unchanged.
    """

    def __init__(self, hidden: Placement, logits: Placement) -> None:
        """
        Args:
            hidden: placement of the input.
            logits: placement of the logits that the layer returns.
        """
        super().__init__()
        self._hidden, self._logits = hidden, logits

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def divide(name: str, child: nn.Module, device_mesh: DeviceMesh) -> None:
            for leaf, parameter in list(child.named_parameters(recurse=False)):
                divided = nn.Parameter(distribute_tensor(parameter, device_mesh, [Shard(0)]), parameter.requires_grad)
                child.register_parameter(leaf, divided)

        def to_local(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            if isinstance(output, DTensor):
                output = output.redistribute(placements=[self._logits]).to_local()
            return output

        distribute_module(module, mesh, divide)
        parallelize_module(module, mesh, GatherInput(self._hidden))
        module.register_forward_hook(to_local)
        return module


class DivideColumns(Style):
    """torch's ``ColwiseParallel``, with correct gradients of plain-tensor inputs.

    Inside a region, the gradient of a replicated tensor is the sum of what the ranks compute. torch's style returns that sum
    on every rank, so a later sum would count it once per rank. This style returns an equal part of it on each rank.
    """

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def share(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            first = arguments[0]
            if isinstance(first, DTensor):
                return None
            whole = _ShareOfGradient.apply(first, mesh.size())
            return (DTensor.from_local(whole, mesh, [Replicate()], run_check=False), *arguments[1:])

        module.register_forward_pre_hook(share)  # runs before ColwiseParallel's hook, which passes DTensors through
        return parallelize_module(module, mesh, ColwiseParallel())


class _ShareOfGradient(torch.autograd.Function):
    """The identity; in backward, divides the gradient, equal on ``ranks`` ranks, by their number."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


class WaitForOutput(Style):
    """Wait for the collective that computes the output."""

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda module, arguments, output: wait_tensor(output))
        return module
