"""Expert parallelism (Lepikhin et al., "GShard", arXiv 2006.16668, section 3): each rank holds some of the experts. Rows
travel to the ranks of their experts, and what these compute travels back, by one all-to-all each way.

Experts see the tokens of all ranks of the view, so their gradients are complete over it, and must be summed over the other
ranks with different data alone. FSDP asks the mesh which those are.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from titan_core.api.build_context import TrainingContext
from titan_core.api.job_mesh import JobMesh
from titan_core.api.model_part import ModelPart
from titan_expert_parallel.config import ExpertParallelKeys
from titan_expert_parallel.own_experts import experts_in, holding


def apply(part: ModelPart, context: TrainingContext[ExpertParallelKeys]) -> ModelPart:
    """Divide the modules that hold experts over the view ``ep``."""
    for path, module in part.named_modules():
        rules = experts_in(module, path, part.layout)
        if rules:
            before = dict(module.named_parameters(recurse=False))
            for name, rule in rules.items():
                module.register_parameter(name, _divided(before[name], rule.dim, context.mesh))
            inner: Any = module.forward
            module.forward = ExpertsElsewhere(module, inner, context.mesh["ep"], before)
    return part


def _divided(whole: nn.Parameter, dim: int, mesh: JobMesh) -> nn.Parameter:
    """This rank's experts of a parameter, which tensor parallelism may have divided before."""
    names, placements = ["ep"], list[Placement]([Shard(dim % whole.dim())])
    if isinstance(whole, DTensor):
        names += whole.device_mesh.mesh_dim_names or ()
        placements += whole.placements
    # Nothing has a value yet: the model is on the meta device.
    empty = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    divided = distribute_tensor(empty, mesh[tuple(names)], placements)
    return nn.Parameter(divided, requires_grad=whole.requires_grad)


class ExpertsElsewhere:
    """In place of the forward of a module that holds experts."""

    def __init__(self, module: nn.Module, inner: Any, mesh: DeviceMesh, before: Mapping[str, nn.Parameter]) -> None:
        """
        Args:
            inner: the forward that computes with the experts that the module holds.
            mesh: the ranks that the experts are divided over.
            before: the module's parameters as they were before.
        """
        self._module, self._inner, self._mesh = module, inner, mesh
        self._meshes = {name: one.device_mesh if isinstance(one, DTensor) else None for name, one in before.items()}

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """
        Args:
            rows: ``[rows, dim]``, those of the first expert first.
            counts: rows of each expert, int64 ``[experts]``.
        """
        ranks = self._mesh.size()
        # [ranks, experts of a rank]: what this rank sends to each, and what each sends to this one.
        leaving = counts.view(ranks, -1)
        arriving = all_to_all_single(counts, None, None, self._mesh).view(ranks, -1)
        sent, received = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, received, sent, self._mesh)
        # They come by rank, and for each rank by expert; the experts take them by expert.
        experts = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)
        order = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        computed = self._with_own_experts(arrived[order], arriving.sum(0))
        return all_to_all_single_autograd(computed[order.argsort()], sent, received, self._mesh)

    def _with_own_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The module's own forward, whose code finds this rank's experts where it reads its parameters: plain tensors, or
        what tensor parallelism has made of them."""
        divided = self._module._parameters
        with holding(self._module, {name: _own(divided[name], mesh) for name, mesh in self._meshes.items()}):
            computed: Tensor = self._inner(rows, counts)
        return computed


def _own(parameter: Any, mesh: DeviceMesh | None) -> Tensor:
    local: Tensor = parameter.to_local(grad_placements=parameter.placements)
    if mesh is None:
        return local
    return DTensor.from_local(local, mesh, parameter.placements[1:], run_check=False)
