"""Sizes of Qwen3 (Qwen Team, "Qwen3 Technical Report", arXiv 2505.09388, table 1; widths from the configs that were
published with the weights). Imports no torch."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from titan_core.api import Epsilon, Layers, PositiveInt, Size
from titan_core.api.config.numbers import LARGEST_FLOAT


class Qwen3Args(BaseModel):
    """Arguments of a Qwen3 model."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dim: Size
    """Width of the hidden states."""
    n_layers: Layers = Field(gt=0)
    """Number of transformer blocks."""
    n_heads: Size
    """Number of query heads."""
    n_kv_heads: Size
    """Number of key and value heads, each shared by n_heads / n_kv_heads query heads."""
    head_dim: Size = 128
    """Width of a head. All heads together may be wider or narrower than the hidden states."""
    ffn_dim: Size
    """Width inside the feed-forward layer."""
    vocab_size: Size = 151_936
    """Number of tokens in the vocabulary."""
    max_seq_len: PositiveInt = 40_960
    """Longest context, in tokens."""
    rope_theta: float = Field(default=1_000_000.0, ge=1.0, le=LARGEST_FLOAT)
    """Base of the rotary frequencies."""
    norm_eps: Epsilon = 1e-6
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Whether the output layer shares the embedding's weight."""
    n_mtp_layers: Layers = Field(default=0, ge=0)
    """Number of further blocks that predict tokens after the next one, in training only: the first one the token after it,
    and so on (multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

    @property
    def num_blocks(self) -> int:
        """Number of all blocks."""
        return self.n_layers + self.n_mtp_layers

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        block = self._attention_params + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim
        # A block of prediction also has a projection of two states to one, two norms before it, and a final norm.
        mtp = self.n_mtp_layers * (2 * self.dim**2 + 3 * self.dim)
        return self.num_blocks * block + mtp + embeddings + self.dim

    @property
    def num_multiplied_params(self) -> int:
        """Number of parameters of matmuls; an embedding look-up is none."""
        return self.num_params - (0 if self.tie_embeddings else self.vocab_size * self.dim)

    @property
    def _attention_params(self) -> int:
        return 2 * self.dim * (self.n_heads + self.n_kv_heads) * self.head_dim + 2 * self.head_dim

    def flops_per_token(self, seq_len: int) -> float:
        """Return the floating-point operations of forward and backward per token.

        6 per parameter that a token is multiplied by, and 12 x layers x width of all heads x context for
        attention, without subtracting the half that the causal mask hides (PaLM paper, arXiv 2204.02311, appendix B). The
        output layer counts once for each token that is predicted.
        """
        multiplied = self.num_multiplied_params + self.n_mtp_layers * self.vocab_size * self.dim
        return 6.0 * multiplied + 12.0 * self.num_blocks * self.n_heads * self.head_dim * seq_len

    def block_costs(self, seq_len: int) -> tuple[float, ...]:
        """Return the floating-point operations per token of each block, counted as by :meth:`flops_per_token`. The output
        layer of a predicted token after the next one counts with its block."""
        cost = 6.0 * (self._attention_params + 3.0 * self.dim * self.ffn_dim + 2.0 * self.n_heads * self.head_dim * seq_len)
        return (cost,) * self.n_layers + (cost + self._mtp_cost,) * self.n_mtp_layers

    @property
    def _mtp_cost(self) -> float:
        return 6.0 * (2 * self.dim**2 + self.vocab_size * self.dim)

    @model_validator(mode="after")
    def _divisible(self) -> Qwen3Args:
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: RoPE rotates pairs")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")
        return self


def _published(dim: int, n_layers: int, n_heads: int, ffn_dim: int, tied: bool = False) -> Qwen3Args:
    return Qwen3Args(dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=8, ffn_dim=ffn_dim, tie_embeddings=tied)


FLAVORS: Final[dict[str, Qwen3Args]] = {
    # 288 rows hold the 258 tokens of the byte tokenizer, and are divisible by 2, 4, 8, 16 and 32. As in the small published
    # sizes, the heads together are wider than the hidden states.
    "debug": Qwen3Args(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=48, ffn_dim=384, vocab_size=288, max_seq_len=2048,
        rope_theta=10_000.0,
    ),
    "0.6B": _published(dim=1024, n_layers=28, n_heads=16, ffn_dim=3072, tied=True),
    "1.7B": _published(dim=2048, n_layers=28, n_heads=16, ffn_dim=6144, tied=True),
    "4B": _published(dim=2560, n_layers=36, n_heads=32, ffn_dim=9728, tied=True),
    "8B": _published(dim=4096, n_layers=36, n_heads=32, ffn_dim=12_288),
    "14B": _published(dim=5120, n_layers=40, n_heads=40, ffn_dim=17_408),
    "32B": _published(dim=5120, n_layers=64, n_heads=64, ffn_dim=25_600),
}  # fmt: skip
