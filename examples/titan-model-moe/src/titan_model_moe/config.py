"""The arguments of the model, and the config section of its balance loss."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from titan_core.api import Layers, NonNegativeFloat, PositiveInt, Section, Size


class MoEArgs(BaseModel):
    """Arguments of the model."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dim: Size = 64
    """Width of the hidden states."""
    n_layers: Layers = Field(default=2, gt=0)
    """Number of transformer blocks."""
    n_heads: Size = 4
    """Number of attention heads."""
    n_experts: Size = 4
    """Number of experts in each block."""
    top_k: PositiveInt = 2
    """Number of experts that each token passes through."""
    expert_dim: Size = 96
    """Hidden features of an expert."""
    vocab_size: Size = 288
    """Number of tokens in the vocabulary."""
    max_seq_len: PositiveInt = 512
    """Longest context in tokens."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "MoEArgs":
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k {self.top_k} exceeds n_experts {self.n_experts}")
        if self.dim % self.n_heads:
            raise ValueError(f"n_heads {self.n_heads} must divide dim {self.dim}")
        return self

    @property
    def num_params(self) -> int:
        """The number of parameters."""
        return self._params(self.n_experts)

    @property
    def num_active_params(self) -> int:
        """The number of parameters that each token uses."""
        return self._params(self.top_k)

    @property
    def num_multiplied_params(self) -> int:
        """The number of parameters that each token is multiplied by; an embedding is looked up."""
        return self.num_active_params - (self.vocab_size + self.max_seq_len) * self.dim

    def _params(self, experts: int) -> int:
        attention = 4 * self.dim**2
        feed_forward = self.n_experts * self.dim + experts * 3 * self.dim * self.expert_dim
        block = attention + feed_forward + 2 * self.dim
        return self.n_layers * block + (2 * self.vocab_size + self.max_seq_len + 1) * self.dim


class ExpertBalanceSection(Section):
    section: ClassVar[str] = "expert_balance"

    weight: NonNegativeFloat = 0.0
    """Weight of the loss that keeps experts equally busy in each sequence; 0 disables it."""
