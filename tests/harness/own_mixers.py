"""A mixer of a kind of its own: the mean of all earlier positions. And ways in which its division may go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.small_gpt import DIM, LAYOUT, Block, SmallGPT
from titan_core.api import Mixer, ModelLayout, Ref, Replicate, SequenceShare


class Mean(nn.Module):
    """The mean of a position and all earlier ones, times a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return mean(x) * self.gain


def mean(x: Tensor) -> Tensor:
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


class MeanBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = Mean()

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(x + self.mean(x), documents)


class WithMeans(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MeanBlock() for _ in self.blocks)


def with_means(divided: str) -> ModelLayout:
    """Return the layout of :class:`WithMeans`, whose mixers a function of this module divides."""
    mixer = Mixer(kind="mean", divided=Ref(f"harness.own_mixers:{divided}"))
    rules = {"blocks.*.mean.gain": Replicate(), **LAYOUT.rules}
    return replace(LAYOUT, rules=rules, mixers={**LAYOUT.mixers, "blocks.*.mean": mixer})


def right(module: Mean, share: SequenceShare) -> Callable[[Tensor], Tensor]:
    """Divide the mixer as it should be."""
    return lambda x: share.take(mean(share.gather(x, 1)), 1) * module.gain


class _Gather(torch.autograd.Function):
    """Gathers all positions, and gives each rank only its own addend of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: SequenceShare) -> Tensor:
        ctx.share = share
        return share.gather(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.share.take(gradient, 1), None


def own_addend(module: Mean, share: SequenceShare) -> Callable[[Tensor], Tensor]:
    """Forget to sum the gradient of a rank's positions over the ranks that have read them."""
    return lambda x: share.take(mean(_Gather.apply(x, share)), 1) * module.gain


def doubled(module: Mean, share: SequenceShare) -> Callable[[Tensor], Tensor]:
    """Let the gradient pass twice, with the value of one."""
    return lambda x: share.take(mean(twice(share.gather(x, 1))), 1) * module.gain


def others_detached(module: Mean, share: SequenceShare) -> Callable[[Tensor], Tensor]:
    """Detach what comes from other ranks, as a gather without autograd does."""

    def forward(x: Tensor) -> Tensor:
        whole = share.gather(x, 1)
        own = share.take(torch.arange(whole.shape[1])[None], 1)[0]
        return share.take(mean(whole.detach().index_copy(1, own, x)), 1) * module.gain

    return forward


def gain_of_one_chunk(module: Mean, share: SequenceShare) -> Callable[[Tensor], Tensor]:
    """Let only the first of a rank's chunks train the gain."""

    def forward(x: Tensor) -> Tensor:
        first, second = share.take(mean(share.gather(x, 1)), 1).chunk(2, 1)
        return torch.cat((first * module.gain, second * module.gain.detach()), 1)

    return forward


def stale(module: Mean, share: SequenceShare) -> Callable[[Tensor], Tensor]:
    """Scale by a number that is computed once, from the first microbatch."""
    kept: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        if not kept:
            kept.append(x.detach().mean())
        return share.take(mean(share.gather(x, 1)), 1) * module.gain * (1 + x.detach().mean() - kept[0])

    return forward


def twice(x: Tensor) -> Tensor:
    """Return ``x``, with twice its gradient."""
    return x + (x - x.detach())
