"""The blocks of pre-norm decoders with rotary positions, grouped queries and SwiGLU (arXiv 2407.21783, section 3.2),
written for one device, without parallelism.

Shape suffixes in comments: B batch, S sequence, D width, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import CausalAttention
from titan_nn.decoder_layout import DecoderArgs

Rotation = Callable[[Tensor, Tensor], Tensor]
"""One of :mod:`titan_nn.rotary`."""


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv 2305.13245) with rotary positions.

    Args:
        args: sizes of the model.
        rotate: rotates queries and keys.
        head_norms: whether an RMSNorm over the features of each head precedes the rotation (Dehghani et al.,
            arXiv 2302.05442, section 2).
    """

    def __init__(self, args: DecoderArgs, rotate: Rotation, head_norms: bool = False) -> None:
        super().__init__()
        self.head_dim, self.rotate = args.head_dim, rotate
        q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, q_dim, bias=False)
        self.wk = nn.Linear(args.dim, kv_dim, bias=False)
        self.wv = nn.Linear(args.dim, kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, args.dim, bias=False)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if head_norms else None
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if head_norms else None
        self.mixer = CausalAttention()

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        """``x`` is B S D, ``documents`` B S; for ``rope`` see :func:`~titan_nn.rotary.rotate_neighbours`."""
        batch, seq, _ = x.shape
        # -1: tensor parallelism may leave only some of the heads in a projection.
        q, k, v = (projection(x).view(batch, seq, -1, self.head_dim) for projection in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q, rope), self.rotate(k, rope)
        # Attention returns its result in the layout of the queries, so that ``wo`` reads it without a copy.
        mixed = self.mixer(*(heads.transpose(1, 2) for heads in (q, k, v)), documents)  # B H S E
        return self.wo(mixed.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """B S D to B S D."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each after a norm and within a residual connection."""

    def __init__(self, args: DecoderArgs, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        """B S D to B S D."""
        h = x + self.attention(self.attention_norm(x), rope, documents)
        return h + self.feed_forward(self.ffn_norm(h))
