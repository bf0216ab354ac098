"""Qwen3's description of itself, which transforms read instead of the model class. Imports no torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from titan_core.api import ModelDefinition, ModelLayout
from titan_core.toolkit.decoder_layout import decoder_layout
from titan_models_qwen3.config import Qwen3Args

if TYPE_CHECKING:
    from torch import Tensor, nn


def define(args: Qwen3Args) -> ModelDefinition:
    """Return the definition of a Qwen3 model of this size."""
    return ModelDefinition(
        layout=layout(args),
        build=partial(_build, args),
        num_params=args.num_params,
        flops_per_token=args.flops_per_token,
    )


def layout(args: Qwen3Args) -> ModelLayout:
    """Return the model's parts, their sharding rules and their initial values."""
    return decoder_layout(args, partial(_rope, args))


def _build(args: Qwen3Args) -> nn.Module:
    from titan_models_qwen3.model import Qwen3

    return Qwen3(args)


def _rope(args: Qwen3Args) -> Tensor:
    from titan_models_qwen3.model import rope_table

    return rope_table(args)
