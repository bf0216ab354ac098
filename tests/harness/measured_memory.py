"""Measures the memory of a real job on the CPU, by torch's allocator: nothing here knows the simulation."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from harness.jobs import run_recipe
from titan_core.api.hookspecs import hookimpl


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    """When those of the first step are complete."""
    optimizer: int
    """After the first step."""
    step: int
    """The most that the forward and backward passes of the second step allocate, in addition to what was there before."""


class MemoryMeter:
    """An observer that measures."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self._parameters = [parameter for part in run.parts for parameter in part.module.parameters()]

    @hookimpl(trylast=True)
    def titan_step_start(self, step: int) -> None:
        if step == 2:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()

    @hookimpl(tryfirst=True)
    def titan_gradients_complete(self, step: int) -> None:
        if step == 1:
            self.found["parameters"] = allocated(self._parameters)
            self.found["gradients"] = allocated(one.grad for one in self._parameters if one.grad is not None)
        if step == 2:
            self._profile.stop()
            level = most = 0
            events = [one for one in self._profile.profiler.kineto_results.events() if one.name() == "[memory]"]
            for event in sorted(events, key=lambda one: one.start_ns()):
                level += event.nbytes()
                most = max(most, level)
            self.found["step"] = most


def measured_rank(recipe: str, overrides: dict[str, object], folder: str) -> Measured:
    """Train ``recipe`` for two steps in this process, which may be one of several ranks, and measure."""
    os.chdir(folder)
    meter, states = MemoryMeter(), list[int]()

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        states.append(allocated(value for state in optimizer.state.values() for value in state.values()))

    handle = register_optimizer_step_post_hook(after)
    try:
        run_recipe(recipe, {"training.steps": 2, "job.device": "cpu", **overrides}, observers=[meter])
    finally:
        handle.remove()
    return Measured(optimizer=states[0], **meter.found)


def allocated(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages of ``tensors``, each counted once."""
    locals_ = [getattr(one, "_local_tensor", one) for one in tensors if isinstance(one, Tensor)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in locals_}.values())
