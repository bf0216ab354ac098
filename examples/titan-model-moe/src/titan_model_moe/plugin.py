"""Registers the model ``moe``, its balance loss, its metric and its recipe."""

from titan_core.api import Model, Observer, Phase, Recipe, Ref, Transform, hookimpl, recipes_in
from titan_model_moe.config import ExpertBalanceSection, MoEArgs

api = (1, 0)


@hookimpl
def titan_models() -> list[Model]:
    return [
        Model(
            name="moe",
            summary="a small decoder whose feed-forward layers are mixtures of experts",
            flavors={"tiny": MoEArgs(), "small": MoEArgs(dim=384, n_layers=6, n_heads=6, expert_dim=512, n_experts=8)},
            define=Ref("titan_model_moe.layout:define"),
        )
    ]


@hookimpl
def titan_parallelisms() -> list[Transform]:
    return [
        Transform(
            name="expert_balance",
            summary="a loss that keeps the experts of model 'moe' equally busy",
            config=ExpertBalanceSection,
            phase=Phase.EXPERT,
            active=lambda context: context.section.weight > 0,
            check=Ref("titan_model_moe.layout:check_balance"),
            apply=Ref("titan_model_moe.balance:apply"),
        )
    ]


@hookimpl
def titan_debuggers() -> list[Observer]:
    return [
        Observer(
            name="expert_load",
            summary="the metric expert_load/busiest of model 'moe': rows of the busiest expert, relative to the mean",
            active=lambda context: context.job.model_name == "moe",
            build=Ref("titan_model_moe.load:ExpertLoad"),
            first_rank=True,
        )
    ]


@hookimpl
def titan_recipes() -> list[Recipe]:
    return recipes_in("titan_model_moe")
