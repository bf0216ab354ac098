"""Variants of the small GPT with correct but unusual layouts: whole regions, norms over all heads, fused layers as separate
ones, scaled embeddings and capped logits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from harness import small_gpt
from harness.odd_gpts import FUSED
from harness.small_gpt import DIM, HEAD_DIM, HEADS, LAYOUT, VOCAB, Attention, SmallGPT
from titan_core.api import Replicate, Shard

WHOLE = replace(FUSED, rules={"blocks.*.attention.*": Replicate(), "blocks.*.mlp.*": Replicate(), "*norm*": Replicate()},
    regions=("blocks.*.attention",))  # fmt: skip
"""Attention is computed whole on each rank, and MLPs on its positions."""


class SideBySide(nn.ModuleList):
    """Linear layers whose outputs are one tensor, in place of a fused layer."""

    def __init__(self, *widths: int) -> None:
        super().__init__(nn.Linear(DIM, width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self], dim=-1)


class SplitAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        del self.kv
        keys = small_gpt.KV_HEADS * HEAD_DIM
        self.q = SideBySide(DIM, keys, keys)  # type: ignore[assignment]

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        heads = self.q(x).view(batch, seq, -1, HEAD_DIM).transpose(1, 2)
        keys = heads.shape[1] * small_gpt.KV_HEADS // (HEADS + 2 * small_gpt.KV_HEADS)
        q, k, v = heads.split([heads.shape[1] - 2 * keys, keys, keys], dim=1)
        return self.out(self.mixer(self.norm(q), k, v, documents).transpose(1, 2).reshape(batch, seq, -1))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = SideBySide(2 * DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Unfused(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention, block.mlp = SplitAttention(), GatedMLP()


UNFUSED = replace(LAYOUT, rules={key: rule for key, rule in LAYOUT.rules.items() if "kv" not in key})


class RoundingNorm(nn.Module):
    """RMSNorm as transformers' Llama computes it: rounded before the multiplication, with a gain of 1 + weight."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.variance_epsilon = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1.0 + self.weight) * wide.to(x.dtype)


class JointlyNormed(Attention):
    """Norms of the queries of all heads and of the keys of all heads, like OLMo-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM, eps=1e-3)
        self.key_norm = RoundingNorm(small_gpt.KV_HEADS * HEAD_DIM)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        full = (self.norm(self.q(x)), self.key_norm(self.kv[0](x)), self.kv[1](x))
        q, k, v = (tensor.view(batch, seq, -1, HEAD_DIM).transpose(1, 2) for tensor in full)
        return self.out(self.mixer(q, k, v, documents).transpose(1, 2).reshape(batch, seq, -1))


class JointNorms(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = JointlyNormed()


JOINT = replace(LAYOUT, rules={"blocks.*.attention.*norm.*": Shard(0, norm=True), **LAYOUT.rules})


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * DIM**0.5


class CappedHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) / 2.0) * 2.0


class ScaledAndCapped(SmallGPT):
    """Scales the embedding and caps the logits in modules of these names, and ties the two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.token, self.output = ScaledEmbedding(VOCAB, DIM), CappedHead(DIM, VOCAB, bias=False)
        self.output.weight = self.embedding.token.weight
