"""The model of :mod:`harness.tiny`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.tiny import TinyArgs
from titan_core.api import CausalAttention


def angles(args: TinyArgs) -> Tensor:
    """Return the rotation of each pair of features of a head at each position: ``[position, pair]``, in radians."""
    pairs = args.head_dim // 2
    speeds = 10_000.0 ** -(torch.arange(pairs) / pairs)
    return torch.arange(args.max_seq_len)[:, None] * speeds


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate ``x`` (``[batch, head, seq, head_dim]``) by ``turns`` (``[seq, pair]`` or ``[batch, seq, pair]``)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = turns.cos().unsqueeze(-3), turns.sin().unsqueeze(-3)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, args: TinyArgs, block: int) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        kv_dim = args.n_kv_heads * args.head_dim
        self.wq, self.wo = (nn.Linear(args.dim, args.dim, bias=False) for _ in "qo")
        self.wk, self.wv = (nn.Linear(args.dim, kv_dim, bias=False) for _ in "kv")
        self.sinks = nn.Parameter(torch.empty(args.n_heads)) if args.sinks else None
        self.mixer = CausalAttention(**args.attention(block))

    def forward(self, x: Tensor, turns: Tensor, documents: Tensor | None) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        batch, seq, _ = x.shape
        linears = (self.wq, self.wk, self.wv)
        q, k, v = (linear(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for linear in linears)
        more = {} if self.sinks is None else {"sinks": self.sinks}
        mixed = self.mixer(turned(q, turns), turned(k, turns), v, documents, **more)
        return self.wo(mixed.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, args: TinyArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a pre-norm and a residual connection."""

    def __init__(self, args: TinyArgs, number: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(args.dim, eps=args.norm_eps), Attention(args, number)
        self.ffn_norm, self.feed_forward = nn.RMSNorm(args.dim, eps=args.norm_eps), FeedForward(args)

    def forward(self, x: Tensor, turns: Tensor, documents: Tensor | None) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        x = x + self.attention(self.attention_norm(x), turns, documents)
        return x + self.feed_forward(self.ffn_norm(x))


class TinyModel(nn.Module):
    """Maps token ids to logits."""

    angles: Tensor

    def __init__(self, args: TinyArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(index): Block(args, index) for index in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("angles", torch.empty(args.max_seq_len, args.head_dim // 2), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """``tokens``, ``positions`` and ``documents`` are ``[batch, seq]``; logits are ``[batch, seq, vocab]``."""
        h = self.tok_embeddings(tokens)
        turns = self.angles[: h.shape[1]] if positions is None else self.angles[positions]
        for layer in self.layers.values():
            h = layer(h, turns, documents)
        return self.output(self.norm(h))
