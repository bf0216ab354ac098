"""A model for tests that draws random numbers in training and keeps state in buffers. It has dropout in its blocks. Its
embedding draws from the generators of Python and torch, which changes no result. Two buffers, a count of forward passes in
training and a running statistic of the hidden states, affect its output. If a run loses any of this state, its losses
change. Only :mod:`harness.noisy_model` imports torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from titan_core.api import (
    Column,
    Constant,
    Layers,
    ModelDefinition,
    ModelLayout,
    Normal,
    Replicate,
    Row,
    Share,
    causal_attention,
)

DIM, HEADS, VOCABULARY = 32, 2, 258

NOISY: dict[str, object] = {
    "model.name": "noisy",
    "model.flavor": "tiny",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "training.deterministic": "true",
    "lr_scheduler.warmup_steps": 2,
    "job.device": "cpu",
}
"""Settings of ``tiny`` that train this model in a second."""


class NoisyArgs(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    n_layers: Layers = Field(default=2, gt=0)
    dropout: Share = 0.2
    momentum: Share = 0.3
    """Momentum of the running statistic; 0 disables it. Each rank computes it over its own data, so FSDP ranks diverge."""
    draws: bool = True
    """Whether to draw from generators."""


def define(args: NoisyArgs) -> ModelDefinition:
    """Return the definition of a model of this size."""
    layout = ModelLayout(
        num_blocks=args.n_layers,
        dim=DIM,
        vocab_size=VOCABULARY,
        max_seq_len=64,
        embedding=("embed",),
        blocks="blocks",
        head=("norm", "output"),
        rules={
            "blocks.*.attention.[qkv].*": Column(),
            "blocks.*.attention.o.*": Row(),
            "blocks.*.feed_forward.up.*": Column(),
            "blocks.*.feed_forward.down.*": Row(),
            "*norm*": Replicate(),
        },
        regions=("blocks.*.attention", "blocks.*.feed_forward"),
        mixers={"blocks.*.attention.mixer": causal_attention(HEADS)},
        parameters={"*norm*.weight": Constant(1.0), "*": Normal(std=0.2)},
        buffers={"embed.passes": partial(_buffer, "passes"), "embed.running": partial(_buffer, "running")},
    )
    return ModelDefinition(
        layout=layout,
        build=partial(_build, args),
        num_params=2 * VOCABULARY * DIM + args.n_layers * (12 * DIM**2 + 2 * DIM) + DIM,
        flops_per_token=lambda seq_len: 6.0 * (VOCABULARY * DIM + args.n_layers * 12 * DIM**2),
    )


def _build(args: NoisyArgs) -> Any:
    from harness.noisy_model import NoisyModel

    return NoisyModel(args)


def _buffer(name: str) -> Any:
    from harness import noisy_model

    return noisy_model.buffers()[name]
