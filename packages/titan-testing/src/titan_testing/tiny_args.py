"""The arguments of the model that the suites train. Imports no torch."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from titan_core.api import Epsilon, Layers, NonNegativeInt, PositiveFloat, PositiveInt, Share, Size


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

    recurrent: bool = False
    """Whether each block begins with a mixer of a kind of its own, which brings its rule for context parallelism."""

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
        block += self.dim if self.recurrent else 0
        return self.n_layers * block + (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim + self.dim
