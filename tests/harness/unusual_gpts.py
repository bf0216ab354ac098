"""Variants of the small GPT that are unusual, but correct."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from harness.small_gpt import (
    DIM,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYOUT,
    VOCAB,
    Attention,
    SmallGPT,
    with_parts,
)  # fmt: skip
from titan_core.api import Replicate, Shard, causal_attention


class FusedAttention(Attention):
    """Computes queries, keys and values with one fused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, 3 * DIM)
        self.kv = nn.ModuleList()

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.mix(*self.q(x).chunk(3, dim=-1), documents)


fused = with_parts({"attention": FusedAttention})
_WITHOUT_KV = {key: rule for key, rule in LAYOUT.rules.items() if "kv" not in key}
FUSED = replace(LAYOUT, rules=_WITHOUT_KV, mixers={"blocks.*.attention.mixer": causal_attention(HEADS)})
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
        self.q = SideBySide(DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)  # type: ignore[assignment]

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        features = self.q(x)
        keys = features.shape[-1] * KV_HEADS // (HEADS + 2 * KV_HEADS)
        return self.mix(*features.split([features.shape[-1] - 2 * keys, keys, keys], dim=-1), documents)


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = SideBySide(2 * DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


unfused = with_parts({"attention": SplitAttention, "mlp": GatedMLP})
UNFUSED = replace(LAYOUT, rules=_WITHOUT_KV)


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
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.query_norm, self.key_norm = nn.LayerNorm(DIM, eps=1e-3), RoundingNorm(KV_HEADS * HEAD_DIM)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.mix(self.query_norm(self.q(x)), self.key_norm(self.kv[0](x)), self.kv[1](x), documents)


joint_norms = with_parts({"attention": JointlyNormed})
JOINT = replace(LAYOUT, rules={"blocks.*.attention.*norm.*": Shard(0, norm=True), **LAYOUT.rules})


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * DIM**0.5


class CappedHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) / 2.0) * 2.0


def scaled_and_capped() -> SmallGPT:
    """Return a model that scales the embedding and caps the logits in modules of these names, and ties the two."""
    model = SmallGPT()
    model.embedding.token, model.output = ScaledEmbedding(VOCAB, DIM), CappedHead(DIM, VOCAB, bias=False)
    model.output.weight = model.embedding.token.weight
    return model
