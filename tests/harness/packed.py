"""A model whose weights are packed in another format as GPT-NeoX, GPT-2 and mixtures of experts pack theirs: queries, keys
and values of each head in one transposed tensor, each expert's matrices in tensors of their own, a correction in a buffer.
Only :mod:`harness.packed_model` imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from titan_core.api import (
    Column,
    Constant,
    Count,
    ForeignTensor,
    ModelDefinition,
    ModelLayout,
    Normal,
    Ref,
    Replicate,
    Row,
    WeightFormat,
    Width,
    causal_attention,
)

HEADS, LAYERS, VOCABULARY = 4, 2, 288


class PackedArgs(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dim: Width = Field(default=32, gt=0)
    ffn_dim: Width = Field(default=24, gt=0)
    num_experts: Count = Field(default=4, gt=0)


FORMAT = WeightFormat(
    files="safetensors",
    tensors=Ref("harness.packed:tensors"),
    to_args=Ref("harness.packed:to_args"),
    from_args=Ref("harness.packed:from_args"),
)


def tensors(args: PackedArgs) -> list[ForeignTensor]:
    """Return the tensors of the other format."""
    head = args.dim // HEADS
    found = [
        ForeignTensor("wte.weight", "embed.weight"),
        ForeignTensor("ln_f.weight", "norm.weight"),
        ForeignTensor("lm_head.weight", "output.weight"),
    ]
    for layer in range(LAYERS):
        ours, theirs = f"blocks.{layer}", f"h.{layer}"
        for index, name in enumerate("qkv"):
            rows = range(index * head, (index + 1) * head)
            found.append(
                ForeignTensor(f"{theirs}.qkv.weight", f"{ours}.attention.{name}.weight", rows, 3 * head, transpose=True)
            )
        experts = [f"{theirs}.experts.{expert}" for expert in range(args.num_experts)]
        found += [
            ForeignTensor(f"{theirs}.ln.weight", f"{ours}.attention_norm.weight"),
            ForeignTensor(f"{theirs}.proj.weight", f"{ours}.attention.o.weight", transpose=True),
            ForeignTensor(
                f"{theirs}.experts.*.gate,up",
                f"{ours}.experts.gate_up",
                pieces=tuple((f"{one}.{name}", args.ffn_dim) for one in experts for name in ("gate", "up")),
            ),
            ForeignTensor(
                f"{theirs}.experts.*.down",
                f"{ours}.experts.down",
                pieces=tuple((f"{one}.down", args.dim) for one in experts),
                transpose=True,
            ),
            ForeignTensor(f"{theirs}.score_correction", f"{ours}.experts.correction", buffer=True),
        ]
    return found


def to_args(config: Mapping[str, Any]) -> PackedArgs:
    """Return the arguments in a ``config.json``."""
    if config.get("model_type") != "packed":
        raise ValueError("model_type is not 'packed'")
    return PackedArgs(**{name: config[name] for name in PackedArgs.model_fields})


def from_args(args: PackedArgs) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    return {"model_type": "packed", **args.model_dump()}


def define(args: PackedArgs) -> ModelDefinition:
    """Return the definition of a model of this size."""
    block = 4 * args.dim**2 + args.num_experts * 3 * args.dim * args.ffn_dim + args.dim
    layout = ModelLayout(
        num_blocks=LAYERS,
        dim=args.dim,
        vocab_size=VOCABULARY,
        max_seq_len=64,
        embedding=("embed",),
        blocks="blocks",
        head=("norm", "output"),
        rules={
            "blocks.*.attention.[qkv].*": Column(),
            "blocks.*.attention.o.*": Row(),
            "blocks.*.experts.*": Replicate(),
            "*norm*": Replicate(),
        },
        regions=("blocks.*.attention",),
        mixers={"blocks.*.attention.mixer": causal_attention(HEADS)},
        parameters={"*norm*.weight": Constant(1.0), "*": Normal(std=0.2)},
        buffers={"blocks.*.experts.correction": partial(_correction, args)},
    )
    return ModelDefinition(
        layout=layout,
        build=partial(_build, args),
        num_params=2 * VOCABULARY * args.dim + LAYERS * block + args.dim,
        flops_per_token=lambda seq_len: 6.0 * LAYERS * block,
    )


def _build(args: PackedArgs) -> Any:
    from harness.packed_model import PackedModel

    return PackedModel(args)


def _correction(args: PackedArgs) -> Any:
    import torch

    return torch.zeros(args.num_experts)
