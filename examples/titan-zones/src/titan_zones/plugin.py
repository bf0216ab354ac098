"""Registers the mesh dimension ``zone``."""

from titan_core.api import MeshDim, MeshUse, Phase, Transform, hookimpl
from titan_zones.config import ZonesSection

api = (1, 0)

ZONE = MeshDim("zone", "zones.count", divides="batch", before="pp", data_parallel="replicate")


@hookimpl
def titan_parallelisms() -> list[Transform]:
    return [
        Transform(
            name="zones",
            summary="data parallelism over zones with slow links between them",
            config=ZonesSection,
            phase=Phase.DATA,
            mesh=MeshUse(dims=(ZONE,)),
            active=lambda context: context.job.mesh.degree("zone") > 1,
        )
    ]
