"""Sizes of Qwen3's mixtures of experts (Qwen Team, arXiv 2505.09388, table 2; widths from the configs that were published
with the weights). Imports no torch."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, model_validator

from titan_core.api import Layers, NonNegativeInt, PositiveFloat, PositiveInt, Size
from titan_models_qwen3.config import Qwen3Args


class Qwen3MoEArgs(Qwen3Args):
    """Arguments of a Qwen3 model with mixtures of experts. The router can also choose as DeepSeek-V3's does
    (arXiv 2412.19437, section 2.1.2)."""

    ffn_dim: Size
    """Width inside the feed-forward layer of blocks without experts."""
    n_dense_layers: Layers = Field(default=0, ge=0)
    """Number of blocks without experts, the first ones."""
    n_experts: Size = 128
    """Number of experts that the router of a block chooses from."""
    experts_per_token: PositiveInt = 8
    """Number of experts that each token passes through."""
    expert_dim: Size
    """Width inside an expert."""
    n_shared_experts: NonNegativeInt = 0
    """Number of experts that all tokens pass through, in addition."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """What turns a token's affinities with the experts into scores."""
    choice_bias: bool = False
    """Whether a bias for each expert is added to the scores for the choice only."""
    n_groups: PositiveInt = 1
    """Number of groups of successive experts. 1: any experts can be chosen together."""
    n_chosen_groups: PositiveInt = 1
    """Number of groups that the experts of a token are in: those whose two highest scores have the highest sum."""
    norm_weights: bool = True
    """Whether the scores of the chosen experts are divided by their sum."""
    weight_scale: PositiveFloat = 1.0
    """Factor on the weights of the chosen experts."""

    @property
    def shared_dim(self) -> int:
        """Width of all shared experts together."""
        return self.n_shared_experts * self.expert_dim

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        return self._num_params(self.n_experts)

    @property
    def num_active_params(self) -> int:
        """Number of parameters that a token uses."""
        return self._num_params(self.experts_per_token)

    @property
    def num_multiplied_params(self) -> int:
        """Number of parameters that a token is multiplied by."""
        return self.num_active_params - (0 if self.tie_embeddings else self.vocab_size * self.dim)

    def block_costs(self, seq_len: int) -> tuple[float, ...]:
        """See :meth:`Qwen3Args.block_costs`."""
        attention = self._attention_params + 2.0 * self.n_heads * self.head_dim * seq_len
        dense = attention + 3.0 * self.dim * self.ffn_dim
        sparse = attention + self._feed_forward_params(self.experts_per_token)
        costs = (6.0 * dense,) * self.n_dense_layers + (6.0 * sparse,) * (self.n_layers - self.n_dense_layers)
        return costs + (6.0 * sparse + self._mtp_cost,) * self.n_mtp_layers

    def _num_params(self, experts: int) -> int:
        sparse = self.num_blocks - self.n_dense_layers
        dense = super().num_params - 3 * self.dim * self.ffn_dim * sparse
        return dense + sparse * self._feed_forward_params(experts)

    def _feed_forward_params(self, experts: int) -> int:
        return self.n_experts * self.dim + 3 * self.dim * (experts * self.expert_dim + self.shared_dim)

    @model_validator(mode="after")
    def _can_choose(self) -> Qwen3MoEArgs:
        if self.n_dense_layers >= self.n_layers:
            raise ValueError(f"n_dense_layers {self.n_dense_layers} must be less than n_layers {self.n_layers}")
        if self.n_experts % self.n_groups:
            raise ValueError(f"n_groups {self.n_groups} must divide n_experts {self.n_experts}")
        if self.n_groups > 1 and self.n_experts // self.n_groups < 2:
            raise ValueError(f"each of n_groups {self.n_groups} must have two of the n_experts {self.n_experts}, or more")
        if self.n_chosen_groups > self.n_groups:
            raise ValueError(f"n_chosen_groups {self.n_chosen_groups} exceeds n_groups {self.n_groups}")
        choices = self.n_experts // self.n_groups * self.n_chosen_groups
        if self.experts_per_token > choices:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds the {choices} experts to choose from")
        return self


def _published(dim: int, n_layers: int, n_heads: int, ffn_dim: int, expert_dim: int) -> Qwen3MoEArgs:
    return Qwen3MoEArgs(
        dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=4, ffn_dim=ffn_dim, expert_dim=expert_dim
    )  # fmt: skip


FLAVORS: Final[dict[str, Qwen3MoEArgs]] = {
    "debug": Qwen3MoEArgs(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=48, ffn_dim=384, vocab_size=288, max_seq_len=2048,
        rope_theta=10_000.0, n_experts=8, experts_per_token=2, expert_dim=128,
    ),
    "30B-A3B": _published(dim=2048, n_layers=48, n_heads=32, ffn_dim=6144, expert_dim=768),
    "235B-A22B": _published(dim=4096, n_layers=94, n_heads=64, ffn_dim=12_288, expert_dim=1536),
}  # fmt: skip
