"""The small GPT with four blocks that count in each step, and jobs that train it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.jobs import RunRecord, run_job
from harness.small_gpt import LAYOUT, MLP, Block, SmallGPT, definition, job_of
from titan_core.api import PendingUpdate, Run, add_statistic, hookimpl

LAYERS, CHOICES = 4, 3


def choices(hidden: Tensor) -> Tensor:
    """Return how many positions of ``hidden``, ``[batch, seq, dim]``, choose each of a few features: the largest."""
    return (hidden[..., :CHOICES].argmax(-1, keepdim=True) == torch.arange(CHOICES, device=hidden.device)).sum((0, 1))


class CountingMLP(MLP):
    """Counts within a region: each rank of tensor parallelism has all positions, and some of the features."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x = add_statistic(x, "inside", choices(x), index=self.layer)
        hidden = self.up(x)
        hidden = add_statistic(hidden, "features", (hidden > 0).sum(), index=(self.layer,), divided=True)
        return self.down(nn.functional.silu(hidden))


class CountingBlock(Block):
    """Counts outside regions."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.mlp = layer, CountingMLP(layer)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = super().forward(x, documents)
        return self._count(x, choices(x))

    @torch.compiler.disable  # otherwise each block is compiled for its own number
    def _count(self, x: Tensor, values: Tensor) -> Tensor:
        return add_statistic(x, "outside", values, index=self.layer)


class Counted(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CountingBlock(layer) for layer in range(LAYERS))


SHAPES = {"inside": (LAYERS, CHOICES), "outside": (LAYERS, CHOICES), "features": (LAYERS,)}
COUNTED = definition(Counted, replace(LAYOUT, num_blocks=LAYERS, statistics=SHAPES))
SETTINGS: dict[str, object] = {"training.steps": 3, "training.global_batch_size": 8, "lr_scheduler.warmup_steps": 1}


def expected(model: nn.Module, tokens: Tensor) -> dict[str, list[Any]]:
    """Count by hooks in a plain forward pass."""
    found: dict[str, list[Tensor]] = {name: [] for name in SHAPES}

    def hook(name: str, count: Callable[[Tensor], Tensor], of_input: bool = False) -> Callable[..., None]:
        return lambda module, inputs, output: found[name].append(count(inputs[0] if of_input else output))

    for block in model.get_submodule("blocks").children():
        block.register_forward_hook(hook("outside", choices))
        block.get_submodule("mlp").register_forward_hook(hook("inside", choices, of_input=True))
        block.get_submodule("mlp.up").register_forward_hook(hook("features", lambda hidden: (hidden > 0).sum()))
    model(tokens)
    return {name: torch.stack(values).tolist() for name, values in found.items()}


class Poisons:
    """Makes the loss of a step NaN, behind all modules that count."""

    def __init__(self, step: int) -> None:
        self.poisoned = step

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        self.weight = run.parts[0].module.get_parameter("norm.weight")

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self.step, self.before = step, self.weight.detach().clone()
        if step == self.poisoned:
            self.weight.data.fill_(float("nan"))

    @hookimpl
    def titan_before_update(self) -> None:
        self.weight.data.copy_(self.before)


@dataclass
class Repeats:
    """Repeats each step, as observers do, and lets the device skip the updates of some steps."""

    skips: tuple[int, ...] = ()

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> Tensor:
        update.repeat_forward()
        with update.repeat_backward():
            pass
        return torch.tensor(update.step in self.skips)


def train(folder: str, overrides: dict[str, object], *observers: object) -> RunRecord:
    os.chdir(folder)
    job = job_of(COUNTED, {**SETTINGS, **overrides}, int(os.environ["WORLD_SIZE"]))
    return run_job(job, observers=observers)
