"""Sizes of Llama 3.1 and 3.2 (Llama Team, "The Llama 3 Herd of Models", arXiv 2407.21783, table 3; 1B and 3B from the
configs that Meta released with Llama 3.2), and smaller ones of our own. Imports no torch."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from titan_core.api import Epsilon, Layers, PositiveFloat, PositiveInt, Size
from titan_core.api.config.numbers import LARGEST_FLOAT


class RopeScaling(BaseModel):
    """Llama 3.1's extension of RoPE to longer contexts: divides low frequencies by ``factor``, keeps high ones, and blends
    those in between."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    factor: float = Field(default=8.0, ge=1.0, le=LARGEST_FLOAT)
    """Divisor of the low frequencies."""
    low_freq_factor: PositiveFloat = 1.0
    """Frequencies with wavelengths above original_max_seq_len / low_freq_factor are low."""
    high_freq_factor: PositiveFloat = 4.0
    """Frequencies with wavelengths below original_max_seq_len / high_freq_factor are high."""
    original_max_seq_len: PositiveInt = 8192
    """Context length before the extension, in tokens."""

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor:g} must be less than high_freq_factor {self.high_freq_factor:g}"
            )
        return self


class LlamaArgs(BaseModel):
    """Arguments of a Llama model."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dim: Size
    """Width of the hidden states."""
    n_layers: Layers = Field(gt=0)
    """Number of transformer blocks."""
    n_heads: Size
    """Number of query heads."""
    n_kv_heads: Size
    """Number of key and value heads, each shared by n_heads / n_kv_heads query heads."""
    ffn_dim: Size
    """Width inside the feed-forward layer."""
    vocab_size: Size = 128_256
    """Number of tokens in the vocabulary."""
    max_seq_len: PositiveInt = 131_072
    """Longest context, in tokens."""
    rope_theta: float = Field(default=500_000.0, ge=1.0, le=LARGEST_FLOAT)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = RopeScaling()
    """Extension to longer contexts."""
    norm_eps: Epsilon = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Whether the output layer shares the embedding's weight."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.n_heads

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.n_kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.dim
        return self.n_layers * block + embeddings + self.dim

    def flops_per_token(self, seq_len: int) -> float:
        """Return the floating-point operations of forward and backward per token.

        6 per parameter of a matmul (an embedding look-up has none), and 12 x layers x width x context for attention, without
        subtracting the half that the causal mask hides (PaLM paper, arXiv 2204.02311, appendix B; as TorchTitan counts).
        """
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.dim
        return 6.0 * (self.num_params - looked_up) + 12.0 * self.n_layers * self.dim * seq_len

    @model_validator(mode="after")
    def _divisible(self) -> LlamaArgs:
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 x n_heads {self.n_heads}: RoPE rotates pairs")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")
        return self


_LLAMA_32 = RopeScaling(factor=32.0)


def _small(dim: int, n_layers: int, n_kv_heads: int, ffn_dim: int, vocab_size: int = 49_152) -> LlamaArgs:
    """Return a shape for one laptop or one GPU: heads of 64, tied embeddings, and RoPE for short contexts.

    49,152 is the vocabulary of SmolLM2, whose tokenizer anyone may download. Llama 3's vocabulary of 128,256 would make
    more than half of a small model an embedding.
    """
    return LlamaArgs(
        dim=dim, n_layers=n_layers, n_heads=dim // 64, n_kv_heads=n_kv_heads, ffn_dim=ffn_dim, vocab_size=vocab_size,
        max_seq_len=2048, rope_theta=10_000.0, rope_scaling=None, tie_embeddings=True,
    )  # fmt: skip


# Names count all parameters, a tied embedding once, with the vocabulary of the flavor.
FLAVORS: Final[dict[str, LlamaArgs]] = {
    # 288 rows hold the 258 tokens of the byte tokenizer, and are divisible by 2, 4, 8, 16 and 32.
    "debug": LlamaArgs(
        dim=128, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=384, vocab_size=288, max_seq_len=2048,
        rope_theta=10_000.0, rope_scaling=None,
    ),
    "10M": _small(dim=384, n_layers=6, n_kv_heads=2, ffn_dim=1024, vocab_size=288),
    "50M": _small(dim=512, n_layers=8, n_kv_heads=4, ffn_dim=1536),
    "150M": _small(dim=768, n_layers=18, n_kv_heads=4, ffn_dim=2048),
    "400M": _small(dim=1024, n_layers=32, n_kv_heads=4, ffn_dim=2688),
    "1B": LlamaArgs(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, rope_scaling=_LLAMA_32, tie_embeddings=True
    ),
    "3B": LlamaArgs(
        dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim=8192, rope_scaling=_LLAMA_32, tie_embeddings=True
    ),
    "8B": LlamaArgs(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336),
    "70B": LlamaArgs(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672),
    "405B": LlamaArgs(dim=16_384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53_248),
}  # fmt: skip
