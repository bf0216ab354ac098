"""The components that titan-experts registers."""

from __future__ import annotations

from titan_core.api import Checks, MeshUse, MeshView, Phase, Planning, Ref, StepUse, Transform, hookimpl
from titan_experts.config import DEGREE, DISPATCH, VIEW, ExpertParallelKeys, ExpertsSection

api = (1, 0)


@hookimpl
def titan_parallelisms() -> list[Transform]:
    return [
        Transform(
            name="expert_parallel",
            summary="each rank holds some of the experts, and tokens are sent to theirs",
            config=ExpertParallelKeys,
            phase=Phase.EXPERT,
            mesh=MeshUse(views=(MeshView(VIEW, DEGREE, borrows=("dp_shard", "cp", "tp"), folds_weights=True),)),
            active=lambda context: context.job.mesh.degree(VIEW) > 1,
            check=Ref("titan_experts.config:check"),
            checks=Checks(model=Ref("titan_experts.check_model:check_model")),
            reads=(DISPATCH,),
            apply=Ref("titan_experts.divide:apply"),
            planning=Planning(choices=Ref("titan_experts.config:choices"), costs=Ref("titan_experts.config:costs")),
        ),
        Transform(
            name="balanced_experts",
            summary="keeps experts equally busy, by a loss or by biases of the choice, and reports how busy they are",
            config=ExpertsSection,
            phase=Phase.EXPERT,
            active=lambda context: (
                context.section.balance != "none"
                or context.section.z_loss_weight > 0
                or context.section.force_balanced
                or (context.section.metrics and bool(context.job.model.layout.routers))
            ),
            check=Ref("titan_experts.check_routers:check"),
            checks=Checks(model=Ref("titan_experts.check_routers:check_model")),
            apply=Ref("titan_experts.balance:apply"),
            steps=StepUse(observer=Ref("titan_experts.balance:ExpertLoads")),
        ),
    ]
