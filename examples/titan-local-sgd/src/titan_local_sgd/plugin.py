"""Registers local SGD and its mesh dimension."""

from titan_core.api import MeshDim, MeshUse, Phase, Ref, StepUse, Transform, hookimpl
from titan_local_sgd.config import LocalSGDSection

api = (1, 0)

ISLAND = MeshDim("island", "local_sgd.islands", divides="batch", diverges=True, before="pp")


@hookimpl
def titan_parallelisms() -> list[Transform]:
    return [
        Transform(
            name="local_sgd",
            summary="islands train diverging replicas and synchronise every N steps (DiLoCo)",
            config=LocalSGDSection,
            phase=Phase.DATA,
            mesh=MeshUse(dims=(ISLAND,)),
            active=lambda context: context.job.mesh.degree("island") > 1,
            steps=StepUse(observer=Ref("titan_local_sgd.outer:OuterOptimizer")),
        )
    ]
