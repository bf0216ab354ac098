"""Measures the memory of a real job on the CPU, by torch's allocator: nothing here knows the simulation."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.fake_cuda import train_simulated
from titan_core.api import hookimpl
from titan_core.loop.lookahead import Lookahead
from titan_testing.jobs import run_recipe

if TYPE_CHECKING:
    from titan_simulate.engine.result import SimulatedRank


STEPS = 6


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    """When those of the first step are complete."""
    optimizer: int
    """After the first step."""
    step: int
    """The most that the forward and backward passes of a later step allocate, in addition to what was there before. The
    least of several steps: threads of a process group free what they have sent when they get to run."""


class MemoryMeter:
    """An observer that measures."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self._parameters = [parameter for part in run.parts for parameter in part.module.parameters()]

    @hookimpl(trylast=True)
    def titan_step_start(self, step: int) -> None:
        if step >= 2:
            self._profile = profile(profile_memory=True)
            self._profile.__enter__()

    @hookimpl(tryfirst=True)
    def titan_gradients_complete(self, step: int) -> None:
        if step == 1:
            self.found["parameters"] = allocated(self._parameters)
            self.found["gradients"] = allocated(one.grad for one in self._parameters if one.grad is not None)
        if step >= 2:
            self._profile.__exit__(None, None, None)
            results: Any = self._profile.kineto_results
            events = [(one.start_ns(), one.nbytes()) for one in results.events() if one.name() == "[memory]"]
            del results, self._profile  # now, by its count of references, and not by the collector within a later step
            level = most = 0
            for _, size in sorted(events, key=lambda one: one[0]):
                level += size
                most = max(most, level)
            self.found["step"] = min(most, self.found.get("step", most))


def measured_rank(site: str, recipe: str, overrides: dict[str, object], folder: str) -> Measured:
    """Train ``recipe`` for some steps in this process, which may be one of several ranks, and measure.

    Args:
        site: folder of further packages.
    """
    os.chdir(folder)
    meter, states = MemoryMeter(), list[int]()

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        states.append(allocated(value for state in optimizer.state.values() for value in state.values()))

    handle = register_optimizer_step_post_hook(after)
    try:
        with _same_kernels(), _begun_unobserved(), patch.object(sys, "path", [site, *sys.path]):
            run_recipe(recipe, {"training.steps": STEPS, "job.device": "cpu", **overrides}, observers=[meter])
    finally:
        handle.remove()
    return Measured(optimizer=states[0], **meter.found)


def allocated(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages of ``tensors``, each counted once."""
    locals_ = [getattr(one, "_local_tensor", one) for one in tensors if isinstance(one, Tensor)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in locals_}.values())


def simulated_rank(site: str, recipe: str, overrides: dict[str, object], world_size: int, rank: int) -> SimulatedRank:
    """Simulate what :func:`measured_rank` measures."""
    with _same_kernels(), patch.object(sys, "path", [site, *sys.path]):
        return train_simulated(recipe, overrides, world_size, rank, False, "NVIDIA H100 80GB HBM3")


@contextmanager
def _same_kernels() -> Iterator[None]:
    """Write out the norm, which has a kernel of its own on GPUs and consists of several operators on CPUs."""

    def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        assert weight is not None and eps is not None
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    with patch.object(torch.nn.functional, "rms_norm", rms_norm):
        yield


@contextmanager
def _begun_unobserved() -> Iterator[None]:
    """Start the collective of the next step in a thread of its own, which no profiler observes.

    A profiler that counts memory and ends while a collective runs writes to memory that it has freed (torch 2.11 to 2.15).
    """
    begin = Lookahead.begin

    def begin_unobserved(*arguments: Any) -> None:
        thread = threading.Thread(target=begin, args=arguments)
        thread.start()
        thread.join()

    with patch.object(Lookahead, "begin", begin_unobserved):
        yield
