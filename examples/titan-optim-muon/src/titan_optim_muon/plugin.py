"""Registers the optimizer ``GatheredMuon``."""

from titan_core.api import Optimizer, Ref, hookimpl
from titan_optim_muon.config import MuonSection

api = (1, 0)


@hookimpl
def titan_optimizers() -> list[Optimizer]:
    return [
        Optimizer(
            name="GatheredMuon",
            summary="orthogonalised momentum for hidden matrices, AdamW for the rest",
            config=MuonSection,
            build=Ref("titan_optim_muon.muon:build"),
        )
    ]
