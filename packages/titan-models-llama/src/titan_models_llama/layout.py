"""Llama's description of itself, which transforms read instead of the model class. Imports no torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from titan_core.api import ModelDefinition, ModelLayout
from titan_models_llama.config import LlamaArgs
from titan_nn.decoder_layout import decoder_layout

if TYPE_CHECKING:
    from torch import Tensor, nn


def define(args: LlamaArgs) -> ModelDefinition:
    """Return the definition of a Llama model of this size."""
    return ModelDefinition(
        layout=layout(args),
        build=partial(_build, args),
        num_params=args.num_params,
        flops_per_token=args.flops_per_token,
    )


def layout(args: LlamaArgs) -> ModelLayout:
    """Return the model's parts, their sharding rules and their initial values."""
    return decoder_layout(args, partial(_rope, args))


def _build(args: LlamaArgs) -> nn.Module:
    from titan_models_llama.model import Llama

    return Llama(args)


def _rope(args: LlamaArgs) -> Tensor:
    from titan_models_llama.model import rope_table

    return rope_table(args)
