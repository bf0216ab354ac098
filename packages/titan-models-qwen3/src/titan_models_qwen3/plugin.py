"""The components that titan-models-qwen3 registers."""

from __future__ import annotations

from titan_core.api import Model, Phase, Recipe, Ref, Transform, WeightFormat, hookimpl, recipes_in
from titan_models_qwen3 import moe_config
from titan_models_qwen3.config import FLAVORS
from titan_models_qwen3.mtp_config import TARGETS, TOKENS, WEIGHTS, MTPKeys

api = (1, 0)


@hookimpl
def titan_models() -> list[Model]:
    return [
        Model(
            name="qwen3",
            summary="Qwen3",
            flavors=FLAVORS,
            define=Ref("titan_models_qwen3.layout:define"),
            formats=(
                WeightFormat(
                    files="safetensors",
                    tensors=Ref("titan_models_qwen3.formats:hf_tensors"),
                    to_args=Ref("titan_models_qwen3.formats:hf_args"),
                    notes=Ref("titan_models_qwen3.formats:hf_notes"),
                    from_args=Ref("titan_models_qwen3.formats:hf_config"),
                    ignored=("*.rotary_emb.inv_freq",),
                ),
            ),
            training_only={"n_mtp_layers": 0},
        ),
        Model(
            name="qwen3_moe",
            summary="Qwen3 with mixtures of experts",
            flavors=moe_config.FLAVORS,
            define=Ref("titan_models_qwen3.moe_layout:define"),
            formats=(
                WeightFormat(
                    files="safetensors",
                    tensors=Ref("titan_models_qwen3.moe_formats:hf_tensors"),
                    to_args=Ref("titan_models_qwen3.moe_formats:hf_args"),
                    notes=Ref("titan_models_qwen3.moe_formats:hf_notes"),
                    from_args=Ref("titan_models_qwen3.moe_formats:hf_config"),
                    ignored=("*.rotary_emb.inv_freq",),
                ),
            ),
            training_only={"n_mtp_layers": 0},
        ),
    ]


@hookimpl
def titan_parallelisms() -> list[Transform]:
    return [
        Transform(
            name="multi_token_prediction",
            summary="the loss of the tokens after the next one, for models with n_mtp_layers",
            config=MTPKeys,
            phase=Phase.TENSOR,
            active=lambda context: TOKENS in context.job.model.layout.inputs,
            extras=(TOKENS, TARGETS, WEIGHTS),
            apply=Ref("titan_models_qwen3.mtp:apply"),
        )
    ]


@hookimpl
def titan_recipes() -> list[Recipe]:
    return recipes_in("titan_models_qwen3")
