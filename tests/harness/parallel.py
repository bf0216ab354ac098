"""A plugin that provides parallelisms to the suites of packages without titan-parallel: torch's ``fully_shard`` over all
ranks. Jobs on other meshes can be assembled, but not built. It is disabled where titan-parallel is enabled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titan_core.api import MeshUse, Phase, Ref, Transform, hookimpl
from titan_core.api.config.sections import TrainingSection
from titan_core.api.parallel.mesh import STANDARD_DIMS

if TYPE_CHECKING:
    from titan_core.api import JobContext, ModelPart, TrainingContext

api = (1, 0)

SHARD = next(dim for dim in STANDARD_DIMS if dim.name == "dp_shard")


MIXED = ("training.mixed_precision_param", "training.mixed_precision_reduce")


def apply(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    """Shard each block and the rest of the model, and reduce gradients as sums."""
    import torch
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    training = context.job.section(TrainingSection)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,
    )
    shared = [] if part.layout.tied else [*part.blocks().values()]
    for module in (*shared, part.module):
        sharded: Any = fully_shard(module, mesh=context.mesh["dp_shard"], mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    part.after_evaluation += tuple(unit.reshard for unit in part.module.modules() if isinstance(unit, FSDPModule))
    return part


def _active(context: JobContext[None]) -> bool:
    training = context.job.section(TrainingSection)
    mixed = {training.mixed_precision_param, training.mixed_precision_reduce} != {"float32"}
    return mixed or context.job.mesh.degree(SHARD.name) > 1


def refuse(part: ModelPart, context: TrainingContext[None]) -> ModelPart:
    """Refuse to build on other dimensions, which exist only for assembly and for tests that need a mesh but no model."""
    raise AssertionError(f"a test of a package's suite trains on {context.job.mesh}: it belongs to tests/integration")


@hookimpl
def titan_parallelisms() -> list[Transform]:
    others = [dim for dim in STANDARD_DIMS if dim is not SHARD]
    return [
        Transform(
            name="harness_data_parallel",
            summary="torch's fully_shard, for tests",
            phase=Phase.DATA,
            active=_active,
            serves=(SHARD.degree_key, *MIXED),
            mesh=MeshUse(sums=(SHARD.name,)),
            apply=Ref("harness.parallel:apply"),
        ),
        Transform(
            name="harness_other_dimensions",
            summary="any mesh, for jobs that are not built",
            phase=Phase.TENSOR,
            active=lambda context: any(context.job.mesh.degree(dim.name) > 1 for dim in others),
            serves=tuple(dim.degree_key for dim in others),
            mesh=MeshUse(sums=tuple(dim.name for dim in others if dim.divides in ("batch", "sequence"))),
            apply=Ref("harness.parallel:refuse"),
        ),
    ]
