"""Registers the expert-parallel transform and its mesh view."""

from titan_core.api import Checks, MeshUse, MeshView, Phase, Ref, Transform, hookimpl
from titan_expert_parallel.check import DEGREE
from titan_expert_parallel.config import ExpertParallelKeys

api = (2, 0)


@hookimpl
def titan_parallelisms() -> list[Transform]:
    return [
        Transform(
            name="expert_parallel",
            summary="each rank holds some of the experts, and tokens are sent to theirs",
            config=ExpertParallelKeys,
            phase=Phase.EXPERT,
            mesh=MeshUse(views=(MeshView("ep", DEGREE, borrows=("dp_shard", "cp")),)),
            active=lambda context: context.job.mesh.degree("ep") > 1,
            check=Ref("titan_expert_parallel.check:check"),
            checks=Checks(model=Ref("titan_expert_parallel.check_model:check_model")),
            apply=Ref("titan_expert_parallel.transform:apply"),
        )
    ]
