"""Modules that compute with their own share of their parameters: any class of module, divided by rule.

The parameters are DTensors, as all of a divided model's are, so that optimizers, checkpoints and the gradient norm see one
kind. Where the module's code reads one (``self.decay``), it gets this rank's share, a plain tensor: the code needs no
operator that DTensors know, and nothing is dispatched twice. torch's parametrizations read parameters in the same way,
through properties of a class made for the purpose; theirs would rename the parameters.
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
    """Divide a module's own parameters; inputs that are DTensors, whole on each rank, arrive as plain tensors."""

    def __init__(self, placements: Mapping[str, Placement], gradient: Placement) -> None:
        """
        Args:
            placements: how each of the module's own parameters lies on the ranks.
            gradient: what each rank computes of the gradients of whole parameters: ``Partial`` where ranks see different
                positions or features, so that the sum over ranks is the gradient, and ``Replicate`` where they see the same.
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
    """One class for all modules that are divided alike: compiled blocks are guarded by their modules' classes."""
    return type(cls.__name__, (cls,), {name: _local(name, placement) for name, placement in gradients})


def _local(name: str, gradient: Placement) -> property:
    def local(module: nn.Module) -> Tensor | None:
        parameter: Any = registered_parameter(module, name)
        # Outside of forward passes FSDP holds it divided once more, and reads it by this name: that is the DTensor itself.
        gathered = isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1
        return parameter.to_local(grad_placements=[gradient]) if gathered else parameter

    return property(local)


def _take_local_inputs(
    module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Each rank computes other features of a whole input, or of its gradient: the sum over ranks is the gradient."""

    def local(one: Any) -> Any:
        return one.to_local(grad_placements=[Partial()]) if isinstance(one, DTensor) else one

    return tuple(map(local, arguments)), {key: local(one) for key, one in keywords.items()}


class SumOutput(Style):
    """What the module returns is this rank's addend of its output, which leaves divided as ``layout`` says."""

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self._layout = layout

    def _divide(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def add(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            addends = DTensor.from_local(output, mesh, [Partial()], run_check=False)
            return addends.redistribute(placements=[self._layout]).to_local()

        module.register_forward_hook(add)
        return module
