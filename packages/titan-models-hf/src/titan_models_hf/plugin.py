"""The components that titan-models-hf registers."""

from __future__ import annotations

from titan_core.api import Checks, Model, Phase, Recipe, Ref, Transform, WeightFormat, hookimpl, recipes_in
from titan_core.api.config.sections import ModelSection
from titan_models_hf.config import FLAVORS

api = (1, 0)

NAME = "hf"


@hookimpl
def titan_models() -> list[Model]:
    return [
        Model(
            name=NAME,
            summary="any causal decoder of transformers",
            flavors=FLAVORS,
            define=Ref("titan_models_hf.layout:define"),
            formats=(
                WeightFormat(
                    files="safetensors",
                    tensors=Ref("titan_models_hf.formats:tensors"),
                    to_args=Ref("titan_models_hf.formats:to_args"),
                    notes=Ref("titan_models_hf.formats:notes"),
                    from_args=Ref("titan_models_hf.formats:from_args"),
                    # Written by old versions of the library; computed, or without effect.
                    ignored=("*.rotary_emb.inv_freq", "*.rotary_emb.original_inv_freq", "*.attention.bias", "*.masked_bias"),
                    priority=-10,  # a plugin of the family describes it better
                ),
            ),
        )
    ]


@hookimpl
def titan_parallelisms() -> list[Transform]:
    return [
        Transform(
            name="transformers_check",
            summary="compares a model of transformers with the library's eager implementation, on a small copy",
            phase=Phase.PIPELINE,
            active=lambda context: context.job.config.section(ModelSection).name == NAME,
            checks=Checks(model=Ref("titan_models_hf.reference:check_model")),
        )
    ]


@hookimpl
def titan_recipes() -> list[Recipe]:
    return recipes_in("titan_models_hf")
