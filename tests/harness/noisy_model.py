"""The model of :mod:`harness.noisy`."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.noisy import DIM, HEADS, VOCABULARY, NoisyArgs
from titan_core.api import CausalAttention, Dropout


def buffers() -> dict[str, Tensor]:
    """Return the initial values of the embedding's buffers."""
    return {"passes": torch.zeros((), dtype=torch.int64), "running": torch.full((DIM,), 0.5)}


class Embedding(nn.Module):
    """Maps tokens to hidden states, which depend on the buffers that forward passes in training update."""

    passes: Tensor
    running: Tensor

    def __init__(self, args: NoisyArgs) -> None:
        super().__init__()
        self.args = args
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        for name, first in buffers().items():
            self.register_buffer(name, torch.empty_like(first))

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, seq]`` to ``[batch, seq, dim]``."""
        h: Tensor = self.tokens(tokens)
        if self.training:
            self.passes.add_(1)
            before = self.running.clone()  # the new statistic depends on later positions
            if self.args.momentum:
                self.running.lerp_(h.detach().abs().mean((0, 1)), self.args.momentum)
            if self.args.draws and random.random() + float(torch.rand(())) > 2.0:
                h = -h
            return h * (1.0 + 0.3 * torch.sin(self.passes.float())) + before
        return h * (1.0 + 0.3 * torch.sin(self.passes.float())) + self.running.clone()


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in "qkvo")
        self.mixer = CausalAttention()

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        batch, seq, _ = x.shape
        q, k, v = (linear(x).view(batch, seq, -1, DIM // HEADS).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.o(self.mixer(q, k, v).transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """GELU between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and a feed-forward layer, each followed by dropout."""

    def __init__(self, args: NoisyArgs) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(DIM), Attention()
        self.norm2, self.feed_forward = nn.RMSNorm(DIM), FeedForward()
        self.dropout1, self.dropout2 = Dropout(args.dropout), Dropout(args.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, dim]`` to the same."""
        x = x + self.dropout1(self.attention(self.norm1(x)))
        return x + self.dropout2(self.feed_forward(self.norm2(x)))


class NoisyModel(nn.Module):
    """Maps token ids to logits."""

    def __init__(self, args: NoisyArgs) -> None:
        super().__init__()
        self.embed = Embedding(args)
        self.blocks = nn.ModuleDict({str(index): Block(args) for index in range(args.n_layers)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """``tokens`` is ``[batch, seq]``; ``positions`` is ignored. Logits are ``[batch, seq, vocab]``."""
        h = self.embed(tokens)
        for block in self.blocks.values():
            h = block(h)
        return self.output(self.norm(h))
