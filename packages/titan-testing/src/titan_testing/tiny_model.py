"""The model of :mod:`titan_testing.tiny`."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import CausalAttention, Dropout, SequenceShare
from titan_testing.tiny_args import TinyArgs


def angles(args: TinyArgs) -> Tensor:
    """Return the rotation of each pair of features of a head at each position: ``[position, pair]``, in radians."""
    pairs = args.head_dim // 2
    speeds = 10_000.0 ** -(torch.arange(pairs) / pairs)
    return torch.arange(args.max_seq_len)[:, None] * speeds


def passes(args: TinyArgs) -> Tensor:
    """Return the initial count of forward passes of a :class:`StatefulEmbedding`."""
    return torch.zeros((), dtype=torch.int64)


def running(args: TinyArgs) -> Tensor:
    """Return the initial statistic of a :class:`StatefulEmbedding`."""
    return torch.full((args.dim,), 0.5)


def correction(args: TinyArgs) -> Tensor:
    """Return the initial shares of :class:`DenseExperts`, before a softmax."""
    return torch.zeros(args.experts)


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
        masked = () if documents is None else (documents,)
        more = {} if self.sinks is None else {"sinks": self.sinks}
        mixed = self.mixer(turned(q, turns), turned(k, turns), v, *masked, **more)
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


class DenseExperts(nn.Module):
    """Every token passes through all experts, whose outputs are added by constant shares."""

    correction: Tensor

    def __init__(self, args: TinyArgs) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(args.experts, 2 * args.ffn_dim, args.dim))
        self.down = nn.Parameter(torch.empty(args.experts, args.dim, args.ffn_dim))
        self.register_buffer("correction", torch.empty(args.experts))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        gate, up = torch.einsum("bsd,efd->besf", x, self.gate_up).chunk(2, -1)
        return torch.einsum("besf,edf,e->bsd", torch.sigmoid(gate) * up, self.down, self.correction.softmax(0))


class RunningMean(nn.Module):
    """The mean of a position and all earlier ones, times a gain."""

    def __init__(self, args: TinyArgs) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(args.dim))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        return running_mean(x) * self.gain


def running_mean(x: Tensor) -> Tensor:
    """Return the mean of each position of ``x``, ``[batch, seq, dim]``, and all earlier ones."""
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


def divided_mean(module: RunningMean, share: SequenceShare) -> Callable[[Tensor], Tensor]:
    """Return the forward of a :class:`RunningMean` on a rank that has a share of each sequence."""
    return lambda x: share.take(running_mean(share.gather(x, 1)), 1) * module.gain


class StatefulEmbedding(nn.Module):
    """Maps tokens to hidden states, which depend on the buffers that forward passes in training update."""

    passes: Tensor
    running: Tensor

    def __init__(self, args: TinyArgs) -> None:
        super().__init__()
        self.args, self.tokens = args, nn.Embedding(args.vocab_size, args.dim)
        self.register_buffer("passes", torch.empty_like(passes(args)))
        self.register_buffer("running", torch.empty_like(running(args)))

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, seq]`` to ``[batch, seq, dim]``."""
        h: Tensor = self.tokens(tokens)
        before = self.running.clone()  # the new statistic depends on later positions
        if self.training:
            self.passes.add_(1)
            if self.args.momentum:
                self.running.lerp_(h.detach().abs().mean((0, 1)), self.args.momentum)
            if self.args.draws and random.random() + float(torch.rand(())) > 2.0:
                h = -h
        return h * (1.0 + 0.3 * torch.sin(self.passes.float())) + before


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a pre-norm, dropout and a residual connection."""

    def __init__(self, args: TinyArgs, number: int) -> None:
        super().__init__()
        self.mean = RunningMean(args) if args.recurrent else None
        self.attention_norm, self.attention = nn.RMSNorm(args.dim, eps=args.norm_eps), Attention(args, number)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = DenseExperts(args) if args.experts else FeedForward(args)
        self.draws = args.stateful and args.draws
        self.dropouts = nn.ModuleList(Dropout(args.dropout) for _ in range(2)) if args.dropout else None

    def forward(self, x: Tensor, turns: Tensor, documents: Tensor | None) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        if self.draws and self.training:
            torch.rand(())  # in vain, and again in recomputation
        if self.mean is not None:
            x = x + self.mean(x)
        x = x + self._dropped(0, self.attention(self.attention_norm(x), turns, documents))
        return x + self._dropped(1, self.feed_forward(self.ffn_norm(x)))

    def _dropped(self, place: int, x: Tensor) -> Tensor:
        return x if self.dropouts is None else self.dropouts[place](x)


class TinyModel(nn.Module):
    """Maps token ids to logits."""

    angles: Tensor

    def __init__(self, args: TinyArgs) -> None:
        super().__init__()
        self.tok_embeddings = StatefulEmbedding(args) if args.stateful else nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(index): Block(args, index) for index in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.get_submodule("tok_embeddings").get_parameter("weight")
        self.register_buffer("angles", torch.empty(args.max_seq_len, args.head_dim // 2), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """``tokens``, ``positions`` and ``documents`` are ``[batch, seq]``; logits are ``[batch, seq, vocab]``."""
        h = self.tok_embeddings(tokens)
        turns = self.angles[: h.shape[1]] if positions is None else self.angles[positions]
        for layer in self.layers.values():
            h = layer(h, turns, documents)
        return self.output(self.norm(h))
