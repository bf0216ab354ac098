"""Qwen3 with mixtures of experts in place of feed-forward layers (arXiv 2505.09388, section 2).

Shape suffixes in comments: B batch, S sequence, N = B x S tokens, D width, K experts of a token, R = N x K rows, E experts.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_models_qwen3.model import Qwen3
from titan_models_qwen3.moe_config import Qwen3MoEArgs
from titan_nn.decoder import FeedForward
from titan_nn.experts import BesideExperts, ExpertChoice, GroupedLinear, combine, mask_rows, permute_to_experts


class TokenRouter(nn.Module):
    """Chooses the experts of each token. Computes in fp32, because a small difference may choose another expert."""

    def __init__(self, args: Qwen3MoEArgs) -> None:
        super().__init__()
        self.sigmoid, self.norm, self.scale = args.scoring == "sigmoid", args.norm_weights, args.weight_scale
        self.weight = nn.Parameter(torch.empty(args.n_experts, args.dim))
        self.logits = nn.Identity()
        self.choice = ExpertChoice(
            args.n_experts,
            args.experts_per_token,
            groups=args.n_groups,
            chosen_groups=args.n_chosen_groups,
            bias=args.choice_bias,
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts; see :class:`titan_core.api.Router`.

        Args:
            tokens: N D or B S D.

        Returns:
            fp32 weights, N K, int64 indices, N K, and fp32 scores, N E.
        """
        logits = self.logits(F.linear(tokens.flatten(0, -2).float(), self.weight.float()))
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        chosen = self.choice(scores)
        weights = scores.gather(1, chosen)
        if self.norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, chosen, scores


class StackedExperts(nn.Module):
    """Stacked SwiGLU layers: the first dimension of each parameter is the expert."""

    def __init__(self, args: Qwen3MoEArgs) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(args.n_experts, args.expert_dim, args.dim))
        self.w2 = nn.Parameter(torch.empty(args.n_experts, args.dim, args.expert_dim))
        self.w3 = nn.Parameter(torch.empty(args.n_experts, args.expert_dim, args.dim))
        self.product = GroupedLinear()

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """R D, sorted by expert, to R D.

        Args:
            rows: see :class:`titan_core.api.Experts`.
            counts: number of rows of each expert, int64 E.
        """
        rows = mask_rows(rows, counts)
        gate = self.product(rows, self.w1, counts, masked=False)
        up = self.product(rows, self.w3, counts, masked=False)
        return mask_rows(self.product(F.silu(gate) * up, self.w2, counts, masked=False), counts)


class MixtureOfExperts(nn.Module):
    """Sends each token through the experts that the router chooses, and through the shared ones. Drops no token."""

    def __init__(self, args: Qwen3MoEArgs) -> None:
        super().__init__()
        self.n_experts = args.n_experts
        self.router = TokenRouter(args)
        self.experts = StackedExperts(args)
        self.shared = FeedForward(args.dim, args.shared_dim) if args.n_shared_experts else None
        self.beside = BesideExperts()

    def forward(self, x: Tensor) -> Tensor:
        """B S D to B S D."""
        weights, chosen, _ = self.router(x)
        rows, counts, places = permute_to_experts(x.flatten(0, 1), chosen, self.n_experts)
        if self.shared is None:
            return combine(self.experts(rows, counts), weights, places).view_as(x)
        outputs, shared = self.beside(self.experts, rows, counts, partial(self.shared, x))
        return combine(outputs, weights, places).view_as(x) + shared


class Qwen3MoE(Qwen3):
    """Token ids to logits."""

    def __init__(self, args: Qwen3MoEArgs) -> None:
        def feed_forward(index: int) -> nn.Module:
            return FeedForward(args.dim, args.ffn_dim) if index < args.n_dense_layers else MixtureOfExperts(args)

        super().__init__(args, feed_forward)
