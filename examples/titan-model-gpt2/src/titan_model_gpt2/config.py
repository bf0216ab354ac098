"""The arguments of a GPT-2."""

from pydantic import BaseModel, ConfigDict, Field

from titan_core.api import Layers, PositiveInt, Size


class GPT2Args(BaseModel):
    """Arguments of a GPT-2."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dim: Size = 768
    """Width of the hidden states."""
    n_layers: Layers = Field(default=12, gt=0)
    """Number of transformer blocks."""
    n_heads: Size = 12
    """Number of attention heads."""
    vocab_size: Size = 50257
    """Number of tokens in the vocabulary."""
    max_seq_len: PositiveInt = 1024
    """Longest context in tokens."""
    tie_embeddings: bool = True
    """Whether the output layer uses the weight of the token embedding."""

    @property
    def num_params(self) -> int:
        """The number of parameters."""
        embeddings = (2 - self.tie_embeddings) * self.vocab_size + self.max_seq_len
        return (self.n_layers * (12 * self.dim + 13) + embeddings + 2) * self.dim
