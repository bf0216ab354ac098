"""Registers the model ``tinygpt`` and its recipe."""

from titan_core.api import Model, Recipe, Ref, hookimpl, recipes_in
from titan_model_tinygpt.config import TinyGPTArgs

api = (1, 0)


@hookimpl
def titan_models() -> list[Model]:
    return [
        Model(
            name="tinygpt",
            summary="a small GPT with learned positions",
            flavors={"tiny": TinyGPTArgs(), "small": TinyGPTArgs(dim=384, n_layers=6, n_heads=6)},
            define=Ref("titan_model_tinygpt.layout:define"),
        )
    ]


@hookimpl
def titan_recipes() -> list[Recipe]:
    return recipes_in("titan_model_tinygpt")
