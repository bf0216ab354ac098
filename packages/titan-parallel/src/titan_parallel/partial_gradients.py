"""Sums the gradients that each rank of tensor parallelism has computed from its own positions or features.

These are the gradients of replicated parameters: norms, biases, routers. They are many and small, so one collective sums all
of them, once per step instead of once per microbatch. Under FSDP, which reduces each over its own ranks first, a rank sums
only its shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_core.api import ModelPart, TrainingContext, hookimpl
from titan_parallel.config import TensorParallelKeys
from titan_parallel.slots import PARTIAL_GRADIENTS
from titan_parallel.torch_private import copy_each, local_tensor, registered_parameter


def observe(parts: Sequence[ModelPart], context: TrainingContext[TensorParallelKeys]) -> object:
    """Return the observer that sums the gradients."""
    return PartialGradients(parts, context.mesh["tp"], context.device)


class PartialGradients:
    """Sums the gradients of the parameters in :data:`PARTIAL_GRADIENTS`, in place."""

    def __init__(self, parts: Sequence[ModelPart], mesh: DeviceMesh, device: torch.device) -> None:
        """
        Args:
            mesh: of one dimension.
            device: where ``mesh`` reduces. Gradients may be on another device (CPU offload).
        """
        self._group, self._device = mesh.get_group(), device
        self._dims = mesh.mesh_dim_names or ()
        self._parameters = [
            (part.module.get_submodule(module), name)
            for part in parts
            for module, names in part.entries(PARTIAL_GRADIENTS).items()
            for name in names
        ]

    @hookimpl(tryfirst=True)  # other observers read gradients
    def titan_gradients_complete(self, step: int) -> None:
        """Sum them."""
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for gradient in self._gradients():
            by_dtype[gradient.dtype].append(gradient)
        for gradients in by_dtype.values():
            self._sum(gradients)

    def _gradients(self) -> Iterable[Tensor]:
        """Return this rank's shards; a parameter that two modules share is in the list once."""
        found: dict[int, Tensor] = {}
        for module, name in self._parameters:
            parameter = registered_parameter(module, name)  # FSDP replaces it from time to time
            if parameter is not None and parameter.grad is not None and self._is_replicated(parameter):
                found[id(parameter)] = parameter.grad
        return [local_tensor(gradient) if isinstance(gradient, DTensor) else gradient for gradient in found.values()]

    def _is_replicated(self, parameter: nn.Parameter) -> bool:
        """Whether the ranks hold it all. A later transform may have divided it among them, over a view of the mesh."""
        return not isinstance(parameter, DTensor) or set(self._dims) <= set(parameter.device_mesh.mesh_dim_names or ())

    @torch.no_grad()
    def _sum(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(self._device)
        dist.all_reduce(flat, group=self._group)
        shares = flat.to(gradients[0].device).split([gradient.numel() for gradient in gradients])
        copy_each(gradients, [share.view(gradient.shape) for gradient, share in zip(gradients, shares, strict=True)])
