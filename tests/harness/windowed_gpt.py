"""A small model whose attention has all options: windows, capped scores, sinks, a scale, and values narrower than keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.small_gpt import DIM, HEAD_DIM, HEADS, KV_HEADS, LAYOUT, Block, SmallGPT, definition
from titan_core.api import CausalAttention, ModelDefinition, Normal, Shard, causal_attention

OPTIONS: tuple[dict[str, Any], ...] = ({"window": 6, "softcap": 2.0}, {"sinks": True, "scale": 0.7})
"""Of the attention of each block."""
VALUE_DIM = HEAD_DIM - 2


class Attention(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(DIM, DIM), nn.Linear(HEADS * VALUE_DIM, DIM)
        self.kv = nn.ModuleList(nn.Linear(DIM, KV_HEADS * width) for width in (HEAD_DIM, VALUE_DIM))
        self.mixer = CausalAttention(**options)
        if "sinks" in options:
            self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        q, k = (linear(x).view(batch, seq, -1, HEAD_DIM).transpose(1, 2) for linear in (self.q, self.kv[0]))
        v = self.kv[1](x).view(batch, seq, -1, VALUE_DIM).transpose(1, 2)
        sinks = {"sinks": self.sinks} if self.mixer.sinks else {}
        return self.out(self.mixer(4 * q, k, v, documents, **sinks).transpose(1, 2).reshape(batch, seq, -1))


class WindowedBlock(Block):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.attention = Attention(options)  # type: ignore[assignment]


class WindowedGPT(SmallGPT):
    def __init__(self, options: Sequence[dict[str, Any]] = OPTIONS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WindowedBlock(one) for one in options)


def windowed(options: Sequence[dict[str, Any]] = OPTIONS) -> ModelDefinition:
    """Return the model whose blocks have these options of attention."""
    mixers = {
        f"blocks.{block}.attention.mixer": causal_attention(HEADS, KV_HEADS, **one) for block, one in enumerate(options)
    }
    layout = replace(
        LAYOUT,
        rules={"*.sinks": Shard(0), **LAYOUT.rules},
        mixers=mixers,
        parameters={"*.sinks": Normal(1.0), **LAYOUT.parameters},
    )
    return definition(partial(WindowedGPT, options), layout)
