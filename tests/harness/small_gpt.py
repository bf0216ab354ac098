"""The smallest model that supports every parallelism, with switches for whatever a test is about, and jobs that train it
without a plugin. Tests that need a broken model change one part of it (:func:`changed`, :func:`with_parts`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api import (
    CausalAttention,
    Column,
    Constant,
    Dropout,
    ModelDefinition,
    ModelLayout,
    Normal,
    Replicate,
    Row,
    Shard,
    add_statistic,
    causal_attention,
)
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_testing.jobs import RunRecord, make_job, run_job

DIM, HEADS, KV_HEADS, VOCAB, LONGEST, BLOCKS = 24, 4, 2, 288, 64, 2
HEAD_DIM = DIM // HEADS
CHOICES = 3


class Attention(nn.Module):
    """Grouped-query attention with a norm of the queries.

    Args:
        p: share that dropout drops: of gathered, of feature-sharded and of sequence-sharded activations.
        options: of :class:`CausalAttention`.
        value_dim: width of the values of a head.
    """

    def __init__(self, p: float = 0.0, options: Mapping[str, Any] | None = None, value_dim: int = HEAD_DIM) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM)
        self.kv = nn.ModuleList(nn.Linear(DIM, KV_HEADS * width) for width in (HEAD_DIM, value_dim))
        self.norm = nn.LayerNorm(HEAD_DIM)
        self.out = nn.Linear(HEADS * value_dim, DIM)
        self.mixer = CausalAttention(**(options or {}))
        self.sinks = nn.Parameter(torch.zeros(HEADS)) if self.mixer.sinks else None
        self.before, self.heads, self.after = (dropout(p) for _ in range(3))

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.before(x)
        q, k, v = (linear(x) for linear in (self.q, *self.kv))
        return self.mix(q, k, v, documents)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Attend with tensors of the heads of this rank, ``[batch, seq, features]``."""
        heads = q.shape[-1] // HEAD_DIM
        q = self.heads(self.norm(q.unflatten(-1, (heads, -1)))).transpose(1, 2)
        k = k.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        v = v.unflatten(-1, (k.shape[1], -1)).transpose(1, 2)
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        return self.after(self.out(self.mixer(q, k, v, documents, **sinks).transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two linear layers. With a number, it counts as the block of this number."""

    def __init__(self, p: float = 0.0, counts_as: int | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.dropout, self.counts_as = dropout(p), counts_as

    def forward(self, x: Tensor) -> Tensor:
        if self.counts_as is not None:  # within a region, where each tensor-parallel rank has all positions
            x = add_statistic(x, "inside", choices(x), index=self.counts_as)
        hidden = self.up(x)
        if self.counts_as is not None:  # and some of the features
            hidden = add_statistic(hidden, "features", (hidden > 0).sum(), index=(self.counts_as,), divided=True)
        return self.down(self.dropout(nn.functional.silu(hidden)))


class Gain(nn.Module):
    """Scales features in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * (1 + self.weight)).to(x.dtype)


class Block(nn.Module):
    """Attention and an MLP, each after a norm. ``gains``: begins and ends with a :class:`Gain`."""

    def __init__(
        self,
        p: float = 0.0,
        gains: bool = False,
        counts_as: int | None = None,
        options: Any = None,
        value_dim: int = HEAD_DIM,
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attention, self.mlp, self.dropout = Attention(p, options, value_dim), MLP(p, counts_as), dropout(p)
        self.gains, self.counts_as = gains, counts_as
        if gains:
            self.first, self.last = Gain(), Gain()

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.first(x) if self.gains else x
        x = x + self.attention(self.norms[0](x), documents)
        x = x + self.dropout(self.mlp(self.norms[1](x)))
        x = self.last(x) if self.gains else x
        return x if self.counts_as is None else self._count(x)

    @torch.compiler.disable  # otherwise each block is compiled for its own number
    def _count(self, x: Tensor) -> Tensor:
        return add_statistic(x, "outside", choices(x), index=self.counts_as or 0)


class Embedding(nn.Module):
    """Embeddings of tokens and positions."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.token, self.position, self.dropout = nn.Embedding(VOCAB, DIM), nn.Embedding(LONGEST, DIM), dropout(p)

    def forward(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class SmallGPT(nn.Module):
    """Maps token ids to logits.

    Args:
        blocks: number of blocks.
        dropout: share that is dropped wherever tensor parallelism divides activations differently.
        gains: whether blocks have modules that compute in fp32 under mixed precision.
        counts: whether blocks count in each step.
        attention: options of the attention of each block in turn.
        value_dim: width of the values of a head.
        between: what ``forward`` does to the hidden states behind the embedding (``"embedded"``) and to ``"logits"``.
        reads: the positions and documents that ``forward`` uses in place of its own.
    """

    def __init__(
        self,
        blocks: int = BLOCKS,
        dropout: float = 0.0,
        gains: bool = False,
        counts: bool = False,
        attention: Sequence[Mapping[str, Any]] = ({},),
        value_dim: int = HEAD_DIM,
        between: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        reads: Callable[..., tuple[Any, Any]] | None = None,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(dropout)
        self.blocks = nn.ModuleList(
            Block(dropout, gains, index if counts else None, attention[index % len(attention)], value_dim)
            for index in range(blocks)
        )
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)
        self.between, self.reads = dict(between or {}), reads

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        if self.reads is not None:
            positions, documents = self.reads(positions, documents)
        h = self.embedded(tokens, positions)
        if "embedded" in self.between:
            h = self.between["embedded"](h)
        logits = self.logits(self.through_blocks(h, documents))
        return self.between["logits"](logits) if "logits" in self.between else logits

    def embedded(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return the hidden states before the first block."""
        return self.embedding(tokens, positions)

    def through_blocks(self, h: Tensor, documents: Tensor | None) -> Tensor:
        """Return the hidden states after the last block."""
        for block in self.blocks:
            h = block(h, documents)
        return h

    def logits(self, h: Tensor) -> Tensor:
        """Return the head's output."""
        return self.output(self.norm(h))


def dropout(p: float) -> nn.Module:
    """Return Titan's dropout, or nothing."""
    return Dropout(p) if p else nn.Identity()


def choices(hidden: Tensor) -> Tensor:
    """Return how many positions of ``hidden``, ``[batch, seq, dim]``, choose each of a few features: the largest."""
    return (hidden[..., :CHOICES].argmax(-1, keepdim=True) == torch.arange(CHOICES, device=hidden.device)).sum((0, 1))


def changed(change: Callable[[Any], object], **switches: Any) -> Callable[[], SmallGPT]:
    """Return a function that builds the model with these switches and then changes it."""

    def build() -> SmallGPT:
        model = SmallGPT(**switches)
        change(model)
        return model

    return build


def with_parts(parts: Mapping[str, Callable[[], nn.Module]], blocks: Iterable[int] | None = None) -> Callable[[], SmallGPT]:
    """Return a function that builds the model with other modules in its blocks, by their names within a block."""

    def replace_parts(model: SmallGPT) -> None:
        for index in range(len(model.blocks)) if blocks is None else blocks:
            for name, build in parts.items():
                model.blocks[index].set_submodule(name, build())

    return changed(replace_parts)


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
GAINS = ("blocks.*.first.weight", "blocks.*.last.weight")


def layout_of(
    blocks: int = BLOCKS, gains: bool = False, counts: bool = False, attention: Sequence[Mapping[str, Any]] = (), **_: Any
) -> ModelLayout:
    """Return the layout of the model with these switches."""
    layout = replace(LAYOUT, num_blocks=blocks)
    if gains:
        rules, values = {**layout.rules, **dict.fromkeys(GAINS, Replicate())}, dict.fromkeys(GAINS, Normal(0.1))
        layout = replace(layout, rules=rules, parameters={**values, **layout.parameters}, exact=GAINS)
    if counts:
        layout = replace(
            layout, statistics={"inside": (blocks, CHOICES), "outside": (blocks, CHOICES), "features": (blocks,)}
        )
    if attention:
        options = [attention[index % len(attention)] for index in range(blocks)]
        mixers = {
            f"blocks.{index}.attention.mixer": causal_attention(HEADS, KV_HEADS, **one) for index, one in enumerate(options)
        }
        layout = replace(layout, mixers=mixers)
        if any(one.get("sinks") for one in options):
            rules, values = {"*.sinks": Shard(0), **layout.rules}, {"*.sinks": Normal(1.0), **layout.parameters}
            layout = replace(layout, rules=rules, parameters=values)
    return layout


def definition(build: Callable[[], object] = SmallGPT, layout: ModelLayout = LAYOUT) -> ModelDefinition:
    """Return the definition of a model that ``build`` returns."""

    def flops(seq_len: int) -> float:
        with torch.device("meta"):
            model: Any = build()
        embeddings = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
        matrices = sum(one.numel() for one in model.parameters() if one.dim() > 1 and id(one) not in embeddings)
        return 6.0 * matrices + 12.0 * DIM * layout.num_blocks * seq_len

    return ModelDefinition(layout=layout, build=build, num_params=1, flops_per_token=flops)


def small(**switches: Any) -> ModelDefinition:
    """Return the definition of :class:`SmallGPT` with these switches."""
    return definition(partial(SmallGPT, **switches), layout_of(**switches))


def job_of(
    model: ModelDefinition, overrides: dict[str, object] | None = None, world_size: int | None = None
) -> AssembledJob:
    """Return a job that trains ``model`` as if a plugin provided it."""
    args = f"{{dim = 32, n_layers = {model.layout.num_blocks}, n_heads = {HEADS}, n_kv_heads = {KV_HEADS}, ffn_dim = 64}}"
    fixed = {"model.args": args, "training.seq_len": 16, "training.local_batch_size": 2, "job.device": "cpu"}
    job = make_job("tiny", {**fixed, **(overrides or {})}, world_size)
    return replace(job, model=model)


def train_model(
    folder: str, model: ModelDefinition, overrides: dict[str, object], observers: Iterable[object] = ()
) -> RunRecord:
    """Train ``model`` in ``folder`` on the ranks of this world."""
    os.chdir(folder)
    return run_job(job_of(model, overrides, int(os.environ["WORLD_SIZE"])), weights=True, observers=observers)
