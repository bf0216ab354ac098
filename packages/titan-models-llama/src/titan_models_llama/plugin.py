"""The components that titan-models-llama registers."""

from __future__ import annotations

from dataclasses import replace

from titan_core.api import Model, Recipe, Ref, Tokenizer, WeightFormat, hookimpl, recipes_in
from titan_models_llama.config import FLAVORS

api = (1, 0)


@hookimpl
def titan_models() -> list[Model]:
    return [
        Model(
            name="llama3",
            summary="Llama 3.1 and 3.2",
            flavors=FLAVORS,
            define=Ref("titan_models_llama.layout:define"),
            formats=(
                WeightFormat(
                    files="safetensors",
                    tensors=Ref("titan_models_llama.formats:hf_tensors"),
                    to_args=Ref("titan_models_llama.formats:hf_args"),
                    notes=Ref("titan_models_llama.formats:hf_notes"),
                    from_args=Ref("titan_models_llama.formats:hf_config"),
                    ignored=("*.rotary_emb.inv_freq",),
                ),
                WeightFormat(
                    files="consolidated",
                    tensors=Ref("titan_models_llama.formats:meta_tensors"),
                    to_args=Ref("titan_models_llama.formats:meta_args"),
                    ignored=("rope.freqs",),
                ),
                WeightFormat(
                    files="dcp",
                    tensors=Ref("titan_models_llama.formats:torchtitan_tensors"),
                    ignored=("freqs_cis",),
                ),
            ),
        )
    ]


@hookimpl
def titan_tokenizers() -> list[Tokenizer]:
    return [
        Tokenizer(name="llama3", summary="Llama 3's tokenizer.model", build=Ref("titan_models_llama.tokenizer:build")),
    ]


@hookimpl
def titan_recipes() -> list[Recipe]:
    return [replace(recipe, default=recipe.name == "llama3_debug") for recipe in recipes_in("titan_models_llama")]
