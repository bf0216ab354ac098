"""Registers the model ``hybrid`` and its recipe."""

from titan_core.api import Model, Recipe, Ref, hookimpl, recipes_in
from titan_model_hybrid.config import HybridArgs

api = (1, 0)


@hookimpl
def titan_models() -> list[Model]:
    return [
        Model(
            name="hybrid",
            summary="a decoder that alternates between a gated linear recurrence and attention",
            flavors={"tiny": HybridArgs()},
            define=Ref("titan_model_hybrid.layout:define"),
        )
    ]


@hookimpl
def titan_recipes() -> list[Recipe]:
    return recipes_in("titan_model_hybrid")
