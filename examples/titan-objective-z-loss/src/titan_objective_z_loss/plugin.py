"""Registers the objective ``next_token_z_loss``."""

from titan_core.api import Objective, Ref, hookimpl
from titan_objective_z_loss.config import ZLossSection

api = (1, 0)


@hookimpl
def titan_objectives() -> list[Objective]:
    return [
        Objective(
            name="next_token_z_loss",
            summary="cross entropy of the next token, with a penalty on the softmax normaliser",
            config=ZLossSection,
            build=Ref("titan_objective_z_loss.objective:NextTokenWithZLoss"),
        )
    ]
