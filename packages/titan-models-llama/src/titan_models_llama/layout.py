"""Llama's description of itself, which transforms read instead of the model class. Imports no torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from titan_core.api import (
    Column,
    Constant,
    InitialValue,
    ModelDefinition,
    ModelLayout,
    Normal,
    Replicate,
    Row,
    TruncatedNormal,
    causal_attention,
)
from titan_models_llama.config import LlamaArgs

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
    return ModelLayout(
        num_blocks=args.n_layers,
        dim=args.dim,
        vocab_size=args.vocab_size,
        max_seq_len=args.max_seq_len,
        embedding=("tok_embeddings",),
        blocks="layers",
        head=("norm", "output"),
        rules={
            "layers.*.attention.w[qkv].weight": Column(),
            "layers.*.attention.wo.weight": Row(),
            "layers.*.feed_forward.w[13].weight": Column(),
            "layers.*.feed_forward.w2.weight": Row(),
            "*norm.weight": Replicate(),
        },
        regions=("layers.*.attention", "layers.*.feed_forward"),
        mixers={"layers.*.attention.mixer": causal_attention(args.n_heads, args.n_kv_heads)},
        masks_documents=True,
        parameters=initial_values(args),
        buffers={"rope": partial(_rope, args)},
        tied={"output.weight": "tok_embeddings.weight"} if args.tie_embeddings else {},
    )


def initial_values(args: LlamaArgs) -> dict[str, InitialValue]:
    """Return TorchTitan's initial values: weights that write to the residual stream start smaller in deeper layers."""
    values: dict[str, InitialValue] = {"*norm.weight": Constant(1.0)}
    for index in range(args.n_layers):
        deep = TruncatedNormal(std=0.02 / (2 * (index + 1)) ** 0.5)
        values[f"layers.{index}.attention.wo.weight"] = deep
        values[f"layers.{index}.feed_forward.w[23].weight"] = deep
    values["layers.*.weight"] = TruncatedNormal(std=0.02)
    # A tied weight starts like an output layer. With an embedding's standard deviation of 1, logits would be too large.
    output = TruncatedNormal(std=args.dim**-0.5)
    values["tok_embeddings.weight"] = output if args.tie_embeddings else Normal(std=1.0)
    if not args.tie_embeddings:
        values["output.weight"] = output
    return values


def _build(args: LlamaArgs) -> nn.Module:
    from titan_models_llama.model import Llama

    return Llama(args)


def _rope(args: LlamaArgs) -> Tensor:
    from titan_models_llama.rope import rope_table

    return rope_table(args)
