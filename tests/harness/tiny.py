"""The model that most tests train: a decoder with grouped-query attention, rotary positions, RMSNorm and SwiGLU, and with
switches for what some tests are about: options of attention, randomness and state, packed experts. Needs no package but the
core; only :mod:`harness.tiny_model` imports torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from titan_core.api import (
    Column,
    Constant,
    Epsilon,
    Layers,
    ModelDefinition,
    ModelLayout,
    NonNegativeInt,
    Normal,
    PositiveFloat,
    PositiveInt,
    Replicate,
    Row,
    Rule,
    Shard,
    Share,
    Size,
    causal_attention,
)


class TinyArgs(BaseModel):
    """Arguments of a tiny model. 288 rows cover the byte tokenizer's 258 tokens and are divisible by 2, 4, 8, 16 and 32."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dim: Size = 128
    """Width of the hidden states."""
    n_layers: Layers = Field(default=6, gt=0)
    """Number of transformer blocks."""
    n_heads: Size = 8
    """Number of query heads."""
    n_kv_heads: Size = 4
    """Number of key and value heads."""
    ffn_dim: Size = 384
    """Width inside the feed-forward layer."""
    vocab_size: Size = 288
    """Number of tokens in the vocabulary."""
    max_seq_len: PositiveInt = 2048
    """Longest context in tokens."""
    norm_eps: Epsilon = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Whether the output layer shares the embedding's weight."""
    window: PositiveInt | None = None
    """Positions that a query of every second block sees, the first included; unset: all."""
    softcap: PositiveFloat | None = None
    """Cap of the scores of all blocks."""
    sinks: bool = False
    """Whether each head has a sink."""
    dropout: Share = 0.0
    """Share that is dropped after attention and after the feed-forward layer of each block."""
    stateful: bool = False
    """Whether the hidden states depend on buffers of the embedding, which forward passes in training update: a count of
    passes, and a running statistic. If a run loses any of this state, its losses change."""
    momentum: Share = 0.3
    """Momentum of the running statistic; 0 disables it. Each rank computes it over its own data, so FSDP ranks diverge."""
    draws: bool = True
    """Whether a stateful embedding draws from the generators of Python and torch, and each block from torch's, which changes
    no result."""
    experts: NonNegativeInt = 0
    """Experts in place of the feed-forward layer: every token passes through all of them."""

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
        block = attention + max(self.experts, 1) * 3 * self.dim * self.ffn_dim + 2 * self.dim
        block += self.n_heads if self.sinks else 0
        return self.n_layers * block + (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim + self.dim


NOISY_ARGS = TinyArgs(
    dim=32, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=64, max_seq_len=64, dropout=0.2, stateful=True
)  # fmt: skip
NOISY: dict[str, object] = {
    "model.name": "noisy",
    "model.flavor": "tiny",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "training.deterministic": "true",
    "lr_scheduler.warmup_steps": 2,
    "job.device": "cpu",
}
"""Settings of ``tiny`` that train a model with dropout and state in a second."""


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
            **_feed_forward_rules(args),
            **({"layers.*.attention.sinks": Shard(0)} if args.sinks else {}),
            "*norm.weight": Replicate(),
        },
        regions=("layers.*.attention",) if args.experts else ("layers.*.attention", "layers.*.feed_forward"),
        mixers={
            f"layers.{index}.attention.mixer": causal_attention(args.n_heads, args.n_kv_heads, **args.attention(index))
            for index in range(args.n_layers)
        },
        masks_documents=True,
        parameters={
            "*norm.weight": Constant(1.0),
            "tok_embeddings*.weight": output if args.tie_embeddings else Normal(1.0),
            **({} if args.tie_embeddings else {"output.weight": output}),
            "*": Normal(0.2 if args.stateful or args.experts else 0.02),
        },
        buffers=_buffers(args),
        tied={"output.weight": "tok_embeddings.weight"} if args.tie_embeddings else {},
    )


def _feed_forward_rules(args: TinyArgs) -> dict[str, Rule]:
    if args.experts:
        return {"layers.*.feed_forward.*": Replicate()}
    return {"layers.*.feed_forward.w[13].weight": Column(), "layers.*.feed_forward.w2.weight": Row()}


def _buffers(args: TinyArgs) -> dict[str, Any]:
    found: dict[str, Any] = {"angles": partial(_of_model, "angles", args)}
    if args.stateful:
        found |= {f"tok_embeddings.{name}": partial(_of_model, name, args) for name in ("passes", "running")}
    if args.experts:
        found["layers.*.feed_forward.correction"] = partial(_of_model, "correction", args)
    return found


def _build(args: TinyArgs) -> Any:
    from harness.tiny_model import TinyModel

    return TinyModel(args)


def _of_model(name: str, args: TinyArgs) -> Any:
    from harness import tiny_model

    return getattr(tiny_model, name)(args)
