"""The model that most tests train: a decoder with grouped-query attention, rotary positions, RMSNorm and SwiGLU. Only
:mod:`harness.tiny_model` imports torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from titan_core.api import (
    Column,
    Constant,
    Epsilon,
    Factor,
    Heads,
    Layers,
    ModelDefinition,
    ModelLayout,
    Normal,
    Replicate,
    Row,
    Shard,
    Tokens,
    VocabularySize,
    Width,
    causal_attention,
)


class TinyArgs(BaseModel):
    """Arguments of a tiny model. 288 rows cover the byte tokenizer's 258 tokens and are divisible by 2, 4, 8, 16 and 32."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dim: Width = Field(default=128, gt=0)
    """Width of the hidden states."""
    n_layers: Layers = Field(default=6, gt=0)
    """Number of transformer blocks."""
    n_heads: Heads = Field(default=8, gt=0)
    """Number of query heads."""
    n_kv_heads: Heads = Field(default=4, gt=0)
    """Number of key and value heads."""
    ffn_dim: Width = Field(default=384, gt=0)
    """Width inside the feed-forward layer."""
    vocab_size: VocabularySize = Field(default=288, gt=0)
    """Number of tokens in the vocabulary."""
    max_seq_len: Tokens = Field(default=2048, gt=0)
    """Longest context in tokens."""
    norm_eps: Epsilon = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Whether the output layer shares the embedding's weight."""
    window: Tokens | None = Field(default=None, gt=0)
    """Positions that a query of every second block sees, the first included; unset: all."""
    softcap: Factor | None = Field(default=None, gt=0)
    """Cap of the scores of all blocks."""
    sinks: bool = False
    """Whether each head has a sink."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.n_heads

    def attention(self, block: int) -> dict[str, Any]:
        """Return the options of a block's attention."""
        window = None if block % 2 else self.window
        return {"window": window, "softcap": self.softcap, "sinks": self.sinks}

    @property
    def num_params(self) -> int:
        """Number of parameters; a shared embedding counts once."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.n_kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        block += self.n_heads if self.sinks else 0
        return self.n_layers * block + (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim + self.dim


def define(args: TinyArgs) -> ModelDefinition:
    """Return the definition of a model of this size."""
    looked_up = 0 if args.tie_embeddings else args.vocab_size * args.dim
    return ModelDefinition(
        layout=layout(args),
        build=partial(_build, args),
        num_params=args.num_params,
        flops_per_token=lambda seq_len: 6.0 * (args.num_params - looked_up) + 12.0 * args.n_layers * args.dim * seq_len,
    )


def layout(args: TinyArgs) -> ModelLayout:
    """Return the layout: the modules, how they may be sharded, and the initial values."""
    output = Normal(args.dim**-0.5)
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
            **({"layers.*.attention.sinks": Shard(0)} if args.sinks else {}),
            "*norm.weight": Replicate(),
        },
        regions=("layers.*.attention", "layers.*.feed_forward"),
        mixers={
            f"layers.{index}.attention.mixer": causal_attention(args.n_heads, args.n_kv_heads, **args.attention(index))
            for index in range(args.n_layers)
        },
        masks_documents=True,
        parameters={
            "*norm.weight": Constant(1.0),
            "tok_embeddings.weight": output if args.tie_embeddings else Normal(1.0),
            **({} if args.tie_embeddings else {"output.weight": output}),
            "*": Normal(0.02),
        },
        buffers={"angles": partial(_angles, args)},
        tied={"output.weight": "tok_embeddings.weight"} if args.tie_embeddings else {},
    )


def _build(args: TinyArgs) -> Any:
    from harness.tiny_model import TinyModel

    return TinyModel(args)


def _angles(args: TinyArgs) -> Any:
    from harness.tiny_model import angles

    return angles(args)
