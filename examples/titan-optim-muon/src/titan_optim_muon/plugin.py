"""Registers the optimizer ``Muon``."""

from titan_core.api.components import Optimizer
from titan_core.api.hookspecs import hookimpl
from titan_core.api.ref import Ref
from titan_optim_muon.config import MuonSection

api = (1, 0)


@hookimpl
def titan_optimizers() -> list[Optimizer]:
    return [
        Optimizer(
            name="Muon",
            summary="orthogonalised momentum for hidden matrices, AdamW for the rest",
            config=MuonSection,
            build=Ref("titan_optim_muon.muon:build"),
        )
    ]
