"""The arguments of a hybrid model."""

from pydantic import BaseModel, ConfigDict, Field

from titan_core.api import Layers, PositiveInt, Size


class HybridArgs(BaseModel):
    """Arguments of a hybrid model."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dim: Size = 96
    """Width of the hidden states."""
    recurrent_dim: Size = 128
    """Number of features of a recurrence."""
    n_layers: Layers = Field(default=4, gt=0)
    """Number of blocks. Recurrent and attention blocks alternate, beginning with a recurrent one."""
    n_heads: Size = 4
    """Number of attention heads."""
    vocab_size: Size = 288
    """Number of tokens in the vocabulary."""
    max_seq_len: PositiveInt = 2048
    """Longest context in tokens."""
    divide_sequences: bool = True
    """Whether the recurrence brings its own rule for context parallelism."""

    def is_recurrent(self, block: int) -> bool:
        """Whether the block with index ``block`` has a recurrence instead of attention."""
        return block % 2 == 0

    @property
    def block_params(self) -> list[int]:
        """The number of parameters of each block."""
        shared = 8 * self.dim**2 + 2 * self.dim
        recurrence = 3 * self.dim * self.recurrent_dim + 5 * self.recurrent_dim
        attention = 4 * self.dim**2
        return [shared + (recurrence if self.is_recurrent(block) else attention) for block in range(self.n_layers)]

    @property
    def num_params(self) -> int:
        """The number of parameters."""
        return sum(self.block_params) + 2 * self.vocab_size * self.dim + self.dim
