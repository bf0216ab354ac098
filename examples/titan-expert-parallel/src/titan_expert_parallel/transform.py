"""Expert parallelism (Lepikhin et al., "GShard", arXiv 2006.16668, section 3). Each rank holds some of the experts. Rows are
sent to the ranks of their experts, and the outputs are sent back, by one all-to-all in each direction.

Experts process tokens from all ranks of the view, so their gradients are complete over the view. They must be summed only
over the other ranks with different data, which FSDP gets from the mesh.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from titan_core.api import Experts, JobMesh, ModelLayout, ModelPart, TrainingContext
from titan_expert_parallel.config import ExpertParallelKeys
from titan_expert_parallel.torch_private import (
    exchange_counts,
    exchange_rows,
    registered_parameters,
    substituted_parameters,
)


def apply(part: ModelPart, context: TrainingContext[ExpertParallelKeys]) -> ModelPart:
    """Divide the modules that hold experts over the view ``ep``."""
    for path, module in part.named_modules():
        rules = expert_rules(module, path, part.layout)
        if rules:
            before = dict(module.named_parameters(recurse=False))
            for name, rule in rules.items():
                module.register_parameter(name, _divided(before[name], rule.dim, context.mesh))
            inner: Any = module.forward
            module.forward = DividedExperts(module, inner, context.mesh["ep"], tuple(rules))
    return part


def expert_rules(module: nn.Module, path: str, layout: ModelLayout) -> dict[str, Experts]:
    """Return the rules of the parameters that hold experts and that ``module``, named ``path``, owns itself."""
    rules = {name: layout.rule(f"{path}.{name}") for name, _ in module.named_parameters(recurse=False)}
    return {name: rule for name, rule in rules.items() if isinstance(rule, Experts)}


def _divided(whole: nn.Parameter, dim: int, mesh: JobMesh) -> nn.Parameter:
    """Return this rank's experts of a parameter, which tensor parallelism may already have divided."""
    names, placements = ["ep"], list[Placement]([Shard(dim % whole.dim())])
    if isinstance(whole, DTensor):
        names += whole.device_mesh.mesh_dim_names or ()
        placements += whole.placements
    # The model is on the meta device, so there are no values to copy.
    empty = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    divided = distribute_tensor(empty, mesh[tuple(names)], placements)
    return nn.Parameter(divided, requires_grad=whole.requires_grad)


class DividedExperts:
    """Replaces the forward of a module that holds experts."""

    def __init__(self, module: nn.Module, inner: Any, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
        """
        Args:
            inner: the original forward, which computes with whichever experts the module holds.
            mesh: the ranks that the experts are divided over.
            names: the module's parameters.
        """
        self._module, self._inner, self._mesh, self._names = module, inner, mesh, names

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """
        Args:
            rows: ``[rows, dim]``, sorted by expert.
            counts: number of rows of each expert, int64 ``[experts]``.
        """
        ranks = self._mesh.size()
        # [ranks, experts per rank]: the rows that this rank sends to each rank, and those that each rank sends to this one.
        leaving = counts.view(ranks, -1)
        arriving = exchange_counts(counts, self._mesh).view(ranks, -1)
        sent, received = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        arrived = exchange_rows(rows, received, sent, self._mesh)
        # Rows arrive sorted by rank, then by expert. The experts need them sorted by expert.
        experts = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)
        order = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        outputs = self._local_forward(arrived[order], arriving.sum(0))
        return exchange_rows(outputs[order.argsort()], sent, received, self._mesh)

    def _local_forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Call the original forward with this rank's experts, or its share of them under tensor parallelism, as parameters:
        plain tensors."""
        parameters: Mapping[str, Any] = registered_parameters(self._module)
        local = {name: parameters[name].to_local(grad_placements=parameters[name].placements) for name in self._names}
        with substituted_parameters(self._module, local):
            output: Tensor = self._inner(rows, counts)
        return output
