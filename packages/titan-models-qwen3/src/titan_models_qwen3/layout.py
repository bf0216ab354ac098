"""Qwen3's description of itself, which transforms read instead of the model class. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from titan_core.api import Constant, InitialValue, ModelDefinition, ModelLayout, Replicate
from titan_models_qwen3.config import Qwen3Args
from titan_models_qwen3.mtp_config import TOKENS
from titan_nn.decoder_layout import decoder_layout

if TYPE_CHECKING:
    from torch import Tensor, nn

Args = TypeVar("Args", bound=Qwen3Args)

USUAL_LENGTH: Final = 4096
"""Tokens of a sequence for which pipelines balance blocks that differ."""


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
    base = decoder_layout(all_blocks(args), partial(_rope, args))
    if not args.n_mtp_layers:
        return base
    return replace(
        base,
        inputs=(TOKENS,),
        states_per_position=1 + args.n_mtp_layers,
        rules={**base.rules, "layers.*.eh_proj.weight": Replicate(), "norm.mtp.*.weight": Replicate()},
        block_costs=args.block_costs(min(args.max_seq_len, USUAL_LENGTH)),
        parameters={**mtp_values(args), **base.parameters},
    )


def all_blocks(args: Args) -> Args:
    """Return the sizes of a model in which the blocks of multi-token prediction are blocks like the others."""
    return args.model_copy(update={"n_layers": args.num_blocks, "n_mtp_layers": 0})


def mtp_values(args: Qwen3Args) -> dict[str, InitialValue]:
    """Return the initial values of what only multi-token prediction has, apart from its blocks."""
    return {"norm.mtp.*.weight": Constant(1.0)} if args.n_mtp_layers else {}


def _build(args: Qwen3Args) -> nn.Module:
    from titan_models_qwen3.model import Qwen3

    return Qwen3(args)


def _rope(args: Qwen3Args) -> Tensor:
    from titan_models_qwen3.model import rope_table

    return rope_table(args)
