"""Registers the mesh dimension ``zone``."""

from titan_core.api.components import Phase, Transform
from titan_core.api.hookspecs import hookimpl
from titan_core.api.mesh import MeshDim
from titan_core.api.ref import Ref
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
            mesh_dims=(ZONE,),
            active=lambda context: context.facts.mesh.degree("zone") > 1,
            serves=("zones.count",),
            apply=Ref("titan_zones.transform:apply"),
        )
    ]
