"""Tries one rank of a job on fake tensors of the CPU: a dry run where no GPU can be simulated, as with a CPU build of torch.
All code but that for GPUs runs, and nothing is measured."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_core.api import World
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.simulation import simulating
from titan_simulate.engine.fake_device import FakeDevice
from titan_simulate.engine.host_waits import HostWaits
from titan_simulate.engine.simulate import Train, prepared, uncompiled
from titan_simulate.engine.world import fake_world

SETTINGS = {"job.device": "cpu", "data.num_workers": "0"}
"""Settings of a job that is tried so."""


@dataclass(frozen=True)
class TriedRank:
    """A rank whose steps work."""

    rank: int
    world_size: int
    mesh: str
    seconds: float


def try_rank(job: AssembledJob, train: Train, rank: int) -> TriedRank:
    """Run ``job`` as ``rank`` of its world until its last step. Parameters have no values, because the host allocates them
    for a module on the meta device, and so has nothing that is computed with them (:class:`FakeDevice`).

    Raises:
        UserError: the job cannot run, or has no such rank.
    """
    job, began = prepared(job, rank), time.monotonic()
    with simulating(_Rank(rank)):
        train(job, [])
    return TriedRank(rank, job.mesh.world_size, str(job.mesh), time.monotonic() - began)


@dataclass
class _Rank:
    """See :class:`titan_core.toolkit.simulation.Simulation`."""

    rank: int
    checks_model: bool = True
    computes: bool = False

    @contextmanager
    def join(self, job: AssembledJob) -> Iterator[World]:
        """See :meth:`titan_core.toolkit.simulation.Simulation.join`."""
        with ExitStack() as stack:
            world = stack.enter_context(fake_world(self.rank, job.mesh, torch.device("cpu")))
            stack.enter_context(uncompiled())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # other threads have no dispatch mode
            stack.enter_context(_FakeCPU(HostWaits(), lambda *_: None))
            yield world


class _FakeCPU(FakeDevice):
    """Also makes fake what torch's distributed code allocates: parameters that FSDP gathers, hidden states that a stage
    receives. Without other ranks, nothing would fill it."""

    def _is_fake(self, operator: Any, tensors: list[Tensor], keywords: dict[str, Any]) -> bool:
        if super()._is_fake(operator, tensors, keywords):
            return True
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
        return operator in _EMPTY and any(part in file for file in files for part in _DISTRIBUTED)


_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
_DISTRIBUTED = ("/torch/distributed/fsdp/", "/torch/distributed/pipelining/")
