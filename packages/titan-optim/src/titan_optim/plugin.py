"""Registers the optimizers."""

from titan_core.api import Optimizer, Ref, hookimpl
from titan_optim.config import MuonSection

api = (2, 1)


@hookimpl
def titan_optimizers() -> list[Optimizer]:
    return [
        Optimizer(
            name="Muon",
            summary="orthogonalised momentum for matrices of hidden layers, each computed by one rank; AdamW for the rest",
            config=MuonSection,
            build=Ref("titan_optim.muon:build"),
            costs=Ref("titan_optim.costs:of_muon"),
        ),
        Optimizer(
            name="AdamWBF16",
            summary="AdamW with its running means in bfloat16, rounded stochastically, equally on any mesh",
            build=Ref("titan_optim.adamw_bf16:build"),
            costs=Ref("titan_optim.costs:of_adamw_bf16"),
        ),
    ]
