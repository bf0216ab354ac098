"""The arguments of a GPT-2."""

from pydantic import BaseModel, ConfigDict, Field

from titan_core.api import Heads, Layers, Tokens, VocabularySize, Width


class GPT2Args(BaseModel):
    """Arguments of a GPT-2."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dim: Width = Field(default=768, gt=0)
    """Width of the hidden states."""
    n_layers: Layers = Field(default=12, gt=0)
    """Number of transformer blocks."""
    n_heads: Heads = Field(default=12, gt=0)
    """Number of attention heads."""
    vocab_size: VocabularySize = Field(default=50257, gt=0)
    """Number of tokens in the vocabulary."""
    max_seq_len: Tokens = Field(default=1024, gt=0)
    """Longest context in tokens."""
    tie_embeddings: bool = True
    """Whether the output layer uses the weight of the token embedding."""

    @property
    def num_params(self) -> int:
        """The number of parameters."""
        embeddings = (2 - self.tie_embeddings) * self.vocab_size + self.max_seq_len
        return (self.n_layers * (12 * self.dim + 13) + embeddings + 2) * self.dim
