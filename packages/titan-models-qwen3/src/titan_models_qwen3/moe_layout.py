"""The description of Qwen3 with mixtures of experts, which transforms read instead of the model class. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from titan_core.api import (
    Column,
    Experts,
    InitialValue,
    ModelDefinition,
    ModelLayout,
    Replicate,
    Router,
    Row,
    Rule,
    TruncatedNormal,
)
from titan_models_qwen3.layout import USUAL_LENGTH, all_blocks, layout as dense_layout, mtp_values
from titan_models_qwen3.moe_config import Qwen3MoEArgs
from titan_nn.decoder_layout import initial_values

if TYPE_CHECKING:
    from torch import Tensor, nn

_FEED_FORWARD = "layers.*.feed_forward"


def define(args: Qwen3MoEArgs) -> ModelDefinition:
    """Return the definition of a model of this size."""
    return ModelDefinition(
        layout=layout(args),
        build=partial(_build, args),
        num_params=args.num_params,
        num_active_params=args.num_active_params,
        flops_per_token=args.flops_per_token,
    )


def layout(args: Qwen3MoEArgs) -> ModelLayout:
    """Return the model's parts, their sharding rules and their initial values."""
    base = dense_layout(args)  # with the blocks of multi-token prediction, if there are some
    # Tensor parallelism divides the feed-forward layers that all tokens pass through.
    dense = [f"layers.{index}.feed_forward" for index in range(args.n_dense_layers)]
    divided = [*dense, *([f"{_FEED_FORWARD}.shared"] if args.n_shared_experts else [])]
    rules: dict[str, Rule] = {name: rule for name, rule in base.rules.items() if "feed_forward" not in name}
    for name in divided:
        rules |= {f"{name}.w[13].weight": Column(), f"{name}.w2.weight": Row()}
    rules |= {f"{_FEED_FORWARD}.router.weight": Replicate(), f"{_FEED_FORWARD}.experts.w[123]": Experts()}
    return replace(
        base,
        rules=rules,
        regions=("layers.*.attention", *divided),
        routers={
            f"{_FEED_FORWARD}.router": Router(
                experts=args.n_experts,
                per_token=args.experts_per_token,
                bias="choice.bias" if args.choice_bias else None,
            )
        },
        exact=(f"{_FEED_FORWARD}.router.weight",),
        block_costs=args.block_costs(min(args.max_seq_len, USUAL_LENGTH)) if args.n_dense_layers else base.block_costs,
        parameters=_initial_values(args),
        buffers={**base.buffers, **_biases(args)},
    )


def _initial_values(args: Qwen3MoEArgs) -> dict[str, InitialValue]:
    """Return the initial values: those of experts are as in feed-forward layers."""
    values = mtp_values(args) | initial_values(all_blocks(args), "feed_forward.*w[23]*")
    return values | {f"{_FEED_FORWARD}.experts.w1": TruncatedNormal(std=0.02)}


def _biases(args: Qwen3MoEArgs) -> dict[str, Callable[[], Tensor]]:
    return {f"{_FEED_FORWARD}.router.choice.bias": partial(_zeros, args)} if args.choice_bias else {}


def _build(args: Qwen3MoEArgs) -> nn.Module:
    from titan_models_qwen3.moe_model import Qwen3MoE

    return Qwen3MoE(args)


def _zeros(args: Qwen3MoEArgs) -> Tensor:
    import torch

    return torch.zeros(args.n_experts)
