"""The arguments of a TinyGPT."""

from pydantic import BaseModel, ConfigDict, Field

from titan_core.api import Layers, PositiveInt, Size


class TinyGPTArgs(BaseModel):
    """Arguments of a TinyGPT."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dim: Size = 96
    """Width of the hidden states."""
    n_layers: Layers = Field(default=4, gt=0)
    """Number of transformer blocks."""
    n_heads: Size = 4
    """Number of attention heads."""
    vocab_size: Size = 288
    """Number of tokens in the vocabulary."""
    max_seq_len: PositiveInt = 512
    """Longest context in tokens."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability of embeddings, of attention outputs and of activations in the MLP."""

    @property
    def num_params(self) -> int:
        """The number of parameters."""
        block = 12 * self.dim**2 + 13 * self.dim
        return self.n_layers * block + (2 * self.vocab_size + self.max_seq_len + 2) * self.dim

    @property
    def num_multiplied_params(self) -> int:
        """The number of parameters that a token is multiplied by; an embedding is looked up."""
        return self.num_params - (self.vocab_size + self.max_seq_len) * self.dim
