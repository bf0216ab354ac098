"""Data parallelism in its plainest form, for suites of packages that do not bring one: torch's ``fully_shard`` over all ranks.
A plugin of its own, since it is switched off where titan-parallel's is on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titan_core.api.components import Phase, Transform
from titan_core.api.hookspecs import hookimpl
from titan_core.api.mesh import STANDARD_DIMS
from titan_core.api.ref import Ref

if TYPE_CHECKING:
    from titan_core.api.job_facts import JobFacts
    from titan_core.api.model_part import ModelPart, TransformContext

api = (1, 0)

SHARD = next(dim for dim in STANDARD_DIMS if dim.name == "dp_shard")


def apply(part: ModelPart, context: TransformContext) -> ModelPart:
    """Shard each block, and what is left of the model, and leave gradients as sums."""
    from torch.distributed.fsdp import fully_shard

    shared = [] if part.layout.tied else [*part.blocks().values()]
    for module in (*shared, part.module):
        sharded: Any = fully_shard(module, mesh=context.mesh["dp_shard"])
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    return part


def _active(facts: JobFacts) -> bool:
    return facts.mesh.degree(SHARD.name) > 1


@hookimpl
def titan_parallelisms() -> list[Transform]:
    here: Ref[Any] = Ref("harness.data_parallel:apply")
    return [
        Transform(
            name="harness_data_parallel",
            summary="torch's fully_shard, for tests",
            phase=Phase.DATA,
            active=_active,
            serves=(SHARD.degree_key,),
            reduces=(SHARD.name,),
            apply=here,
        )
    ]
