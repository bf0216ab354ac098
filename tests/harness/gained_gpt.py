"""The small GPT with modules that compute in fp32 under mixed precision, and jobs that train it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.jobs import RunRecord, run_job
from harness.small_gpt import BLOCKS, DIM, LAYOUT, Block, SmallGPT, definition, job_of
from titan_core.api import Normal, Replicate, hookimpl

PARAM, REDUCE = "training.mixed_precision_param", "training.mixed_precision_reduce"
BFLOAT16: dict[str, object] = {PARAM: "bfloat16"}


class Gain(nn.Module):
    """Scales features in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * (1 + self.weight)).to(x.dtype)


class GainedBlock(Block):
    """Begins and ends with a module that computes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Gain(), Gain()

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.last(super().forward(self.first(x), documents))


class Gained(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GainedBlock() for _ in range(BLOCKS))


GAINS = ("blocks.*.first.weight", "blocks.*.last.weight")
EXACT = replace(
    LAYOUT,
    rules={**LAYOUT.rules, **dict.fromkeys(GAINS, Replicate())},
    parameters={**dict.fromkeys(GAINS, Normal(0.1)), **LAYOUT.parameters},
    exact=GAINS,
)


@dataclass
class Forwards:
    """Records the type of each module's weight in its forward passes, and whether its values are those of bf16."""

    seen: dict[str, set[tuple[torch.dtype, bool]]] = field(default_factory=dict)

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        for part in run.parts:
            for name, module in part.named_modules():
                if isinstance(module, Gain | nn.Linear):
                    module.register_forward_pre_hook(lambda module, _, name=name: self._see(name, module.weight))

    def _see(self, name: str, weight: Tensor) -> None:
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        self.seen.setdefault(name, set()).add((weight.dtype, is_bfloat16(weight)))


def is_bfloat16(tensor: Tensor) -> bool:
    """Whether bf16 has all the values of ``tensor``."""
    return torch.equal(tensor.to(torch.bfloat16).to(tensor.dtype), tensor)


def train(folder: str, overrides: dict[str, object]) -> tuple[RunRecord, dict[str, set[tuple[torch.dtype, bool]]]]:
    os.chdir(folder)
    brief = {"training.steps": 2, "training.global_batch_size": 4, "lr_scheduler.warmup_steps": 1}
    forwards = Forwards()
    job = job_of(definition(Gained, EXACT), {**brief, **overrides}, int(os.environ["WORLD_SIZE"]))
    return run_job(job, weights=True, observers=[forwards]), forwards.seen
