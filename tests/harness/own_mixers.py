"""A mixer of a kind of its own: the mean of all earlier positions. And ways in which its division may go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.small_gpt import DIM, HEAD_DIM, HEADS, KV_HEADS, LAYOUT, Block, SmallGPT, changed
from titan_core.api import Column, Mixer, ModelLayout, Normal, Ref, Replicate, SequenceShare, Shard


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


with_mean = changed(lambda model: setattr(model, "blocks", nn.ModuleList(MeanBlock() for _ in model.blocks)))


def with_means(divided: str) -> ModelLayout:
    """Return the layout of :data:`with_mean`, whose mixers a function of this module divides."""
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


# -- by heads


class Fading(nn.Module):
    """Linear attention whose memory fades, by a rate for each head and a gate for each position and head; values have more
    heads than queries and keys."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, rate: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """``q`` and ``k`` are ``[batch, seq, kv_heads, width]``, ``v`` and the result ``[batch, seq, heads, width]``,
        ``gate`` ``[batch, seq, heads]``, ``rate`` ``[heads]``."""
        q, k = (tensor.repeat_interleave(v.shape[2] // tensor.shape[2], dim=2) for tensor in (q, k))
        order = torch.arange(q.shape[1], device=q.device)
        distance = (order[:, None] - order).clamp(min=0)
        seen = (order[:, None] >= order)[None]
        if documents is not None:
            seen = seen & (documents[:, :, None] == documents[:, None, :])
        fade = torch.exp(-distance * rate[:, None, None]) * seen[:, None]
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * fade
        return torch.einsum("bhij,bjhd->bihd", scores, v * gate[..., None]) * 0.1


class FadingAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.ModuleList(nn.Linear(DIM, KV_HEADS * HEAD_DIM) for _ in range(2))
        self.v, self.gate, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, HEADS), nn.Linear(DIM, DIM)
        self.rate = nn.Parameter(torch.ones(HEADS))
        self.mixer = Fading()

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD_DIM)) for linear in (*self.qk, self.v))
        return self.out(self.mixer(q, k, v, self.gate(x).sigmoid(), self.rate.exp(), documents).flatten(2))


def with_fading() -> SmallGPT:
    """Return a model whose first block has a mixer of another kind."""
    model = SmallGPT()
    model.blocks[0].attention = FadingAttention()
    # Softmax attention does not change with a bias of its keys, whose gradient is nothing but rounding.
    model.blocks[1].attention.kv[0] = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
    return model


def fading_in_part(module: Fading, share: SequenceShare) -> Callable[..., Tensor]:
    """Divide the mixer over positions: each rank gathers those of the others."""

    def forward(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, rate: Tensor, documents: Tensor | None = None) -> Tensor:
        whole = [share.gather(one, 1) for one in (q, k, v, gate)]
        return share.take(Fading.forward(module, *whole, rate, documents), 1)

    return forward


FADING = replace(
    LAYOUT,
    rules={
        "blocks.0.attention.qk.*": Column(), "blocks.0.attention.v.*": Column(), "blocks.0.attention.gate.*": Column(),
        "blocks.0.attention.rate": Shard(0), **LAYOUT.rules,
    },
    mixers={
        "blocks.0.attention.mixer": Mixer(kind="fading", heads=HEADS, kv_heads=KV_HEADS, heads_dim=2),
        "blocks.1.attention.mixer": LAYOUT.mixers["blocks.*.attention.mixer"],
    },
    parameters={"*.rate": Normal(0.5), **LAYOUT.parameters},
)  # fmt: skip
FADING_IN_PART = replace(
    FADING,
    mixers={
        **FADING.mixers,
        "blocks.0.attention.mixer": replace(
            FADING.mixers["blocks.0.attention.mixer"], divided=Ref("harness.own_mixers:fading_in_part")
        ),
    },
)
