"""Modules of any class that compute with this rank's shards of their parameters.

The parameters are DTensors, like all parameters of a sharded model, so optimizers, checkpoints and the gradient norm handle
one kind. When the module's code reads one (``self.decay``), it gets this rank's shard as a plain tensor: the code may use
operators that DTensor does not support, and avoids the cost of DTensor dispatch. torch's parametrizations read parameters in
the same way, through properties of a generated class, but they rename the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, distribute_tensor

from titan_parallel.torch_private import Style, registered_parameter


class LocalParameters(Style):
    """Shard a module's own parameters, and convert replicated DTensor inputs to plain tensors."""

    def __init__(self, placements: Mapping[str, Placement], gradient: Placement) -> None:
        """
        Args:
            placements: placement of each of the module's own parameters.
            gradient: placement of the gradients of replicated parameters: ``Partial`` if ranks see different positions or
                features, so that the gradient is the sum over ranks; ``Replicate`` if they see the same.
        """
        super().__init__()
        self._placements = dict(placements)
        self._gradient = gradient

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        gradients: list[tuple[str, Placement]] = []
        for name, placement in self._placements.items():
            whole = registered_parameter(module, name)
            assert whole is not None
            divided = distribute_tensor(whole, mesh, [placement])
            module.register_parameter(name, nn.Parameter(divided, requires_grad=whole.requires_grad))
            gradients.append((name, self._gradient if placement.is_replicate() else divided.placements[0]))
        cls: Any = type(module)  # hashable, which mypy doubts
        module.__class__ = _with_local_parameters(cls, tuple(gradients))
        module.register_forward_pre_hook(_take_local_inputs, with_kwargs=True)
        return module


@cache
def _with_local_parameters(cls: type[nn.Module], gradients: tuple[tuple[str, Placement], ...]) -> type[nn.Module]:
    """Return one class for all modules with these placements. Compiled blocks guard on the classes of their modules."""
    return type(cls.__name__, (cls,), {name: _local(name, placement) for name, placement in gradients})


def _local(name: str, gradient: Placement) -> property:
    def local(module: nn.Module) -> Tensor | None:
        parameter: Any = registered_parameter(module, name)
        # Between forward passes FSDP shards it once more, over a second mesh dimension, and expects the DTensor itself here.
        gathered = isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1
        return parameter.to_local(grad_placements=[gradient]) if gathered else parameter

    return property(local)


def _take_local_inputs(
    module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert DTensor inputs to plain tensors. Each rank computes different features, so their gradients are partial."""

    def local(value: Any) -> Any:
        return value.to_local(grad_placements=[Partial()]) if isinstance(value, DTensor) else value

    return tuple(map(local, arguments)), {key: local(value) for key, value in keywords.items()}


class SumOutput(Style):
    """Sum the module's output over ranks, and place the sum by ``layout``."""

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self._layout = layout

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def add(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            addends = DTensor.from_local(output, mesh, [Partial()], run_check=False)
            return addends.redistribute(placements=[self._layout]).to_local()

        module.register_forward_hook(add)
        return module
