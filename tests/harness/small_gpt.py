"""The smallest model that supports every parallelism, and jobs that train it, or a variant of it, without a plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.jobs import make_job
from titan_core.api import (
    CausalAttention,
    Column,
    Constant,
    ModelDefinition,
    ModelLayout,
    Normal,
    Replicate,
    Row,
    causal_attention,
)
from titan_core.api.plugins.assembled_job import AssembledJob

DIM, HEADS, KV_HEADS, VOCAB, LONGEST, BLOCKS = 24, 4, 2, 288, 64, 2
HEAD_DIM = DIM // HEADS


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM)
        self.kv = nn.ModuleList(nn.Linear(DIM, KV_HEADS * HEAD_DIM) for _ in range(2))
        self.norm = nn.LayerNorm(HEAD_DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mixer = CausalAttention()

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (linear(x).view(batch, seq, -1, HEAD_DIM).transpose(1, 2) for linear in (self.q, *self.kv))
        return self.out(self.mixer(self.norm(q), k, v, documents).transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attention, self.mlp, self.dropout = Attention(), MLP(), nn.Dropout(p)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x), documents))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(LONGEST, DIM)

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(positions)


class SmallGPT(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block(p) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = self.embedding(tokens, positions)
        for block in self.blocks:
            h = block(h, documents)
        return self.output(self.norm(h))


LAYOUT = ModelLayout(
    num_blocks=BLOCKS,
    dim=DIM,
    vocab_size=VOCAB,
    max_seq_len=LONGEST,
    embedding=("embedding",),
    blocks="blocks",
    head=("norm", "output"),
    rules={
        "blocks.*.attention.q.*": Column(),
        "blocks.*.attention.kv.*": Column(),
        "blocks.*.attention.out.*": Row(),
        "blocks.*.mlp.up.*": Column(),
        "blocks.*.mlp.down.*": Row(),
        "*norm*": Replicate(),
    },
    regions=("blocks.*.attention", "blocks.*.mlp"),
    mixers={"blocks.*.attention.mixer": causal_attention(HEADS, KV_HEADS)},
    masks_documents=True,
    parameters={"*norm*.weight": Constant(1.0), "*bias": Constant(0.0), "*": Normal(0.05)},
)


def definition(build: Callable[[], object] = SmallGPT, layout: ModelLayout = LAYOUT) -> ModelDefinition:
    def flops(seq_len: int) -> float:
        with torch.device("meta"):
            model: Any = build()
        embeddings = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
        matrices = sum(one.numel() for one in model.parameters() if one.dim() > 1 and id(one) not in embeddings)
        return 6.0 * matrices + 12.0 * DIM * layout.num_blocks * seq_len

    return ModelDefinition(layout=layout, build=build, num_params=1, flops_per_token=flops)


def job_of(
    model: ModelDefinition, overrides: dict[str, object] | None = None, world_size: int | None = None
) -> AssembledJob:
    """Return a job that trains ``model`` as if a plugin provided it."""
    args = f"{{dim = 32, n_layers = {model.layout.num_blocks}, n_heads = {HEADS}, n_kv_heads = {KV_HEADS}, ffn_dim = 64}}"
    small = {"model.args": args, "training.seq_len": 16, "training.local_batch_size": 2, "job.device": "cpu"}
    job = make_job("tiny", {**small, **(overrides or {})}, world_size)
    return replace(job, model=model)
