"""The model's sizes."""

from pydantic import BaseModel, ConfigDict


class TinyGPTArgs(BaseModel):
    """Arguments of a TinyGPT."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dim: int = 96
    """Width of the hidden states."""
    n_layers: int = 4
    """Transformer blocks."""
    n_heads: int = 4
    """Attention heads."""
    vocab_size: int = 288
    """Tokens in the vocabulary."""
    max_seq_len: int = 512
    """Longest context in tokens."""

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        block = 12 * self.dim**2 + 13 * self.dim
        return self.n_layers * block + (2 * self.vocab_size + self.max_seq_len + 2) * self.dim
