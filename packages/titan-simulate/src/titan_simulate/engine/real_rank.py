"""Measures one rank of a job of any size on the device of this machine: its kernels, its allocator and its host are real,
and the other ranks are not.

Collectives are torch's fake backend, which copies and takes no time: measured are the computation, the memory and the host
of the rank, without communication. Losses and gradients mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch

from titan_core.api import Run, RunEnd, StepReport, UserError, World, hookimpl
from titan_core.api.config.sections import JobSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.device import Memory, choose_device, device_name, memory, synchronize
from titan_core.toolkit.simulation import simulating
from titan_simulate.engine.simulate import Train, prepared
from titan_simulate.engine.world import fake_world

WARM_UP = 3
"""Steps before the measured ones: they compile, make the optimizer's state and record CUDA graphs."""
SETTINGS = {
    "data.num_workers": "0",
    "metrics.log_freq": "1000000",  # a logged step waits for the device
    "training.on_nan": "ignore",
}
"""Settings of a job that is measured so."""


@dataclass(frozen=True)
class MeasuredRank:
    """A rank, measured without the others."""

    rank: int
    world_size: int
    mesh: str
    device: str
    steps: int
    """Number of measured steps."""
    step_seconds: float
    """Mean time of a step."""
    host_seconds: float
    """Median time in which the host issues a step. On a CPU, the time of a step."""
    tokens_per_second: float
    """Of this rank: the job's tokens of a step, divided by all ranks, in the time of a step."""
    memory: Memory
    """Of this process when the steps have ended."""


def measure_rank(job: AssembledJob, train: Train, rank: int, steps: int) -> MeasuredRank:
    """Run ``job`` as ``rank`` of its world until its last step, and measure the ``steps`` that follow the first
    :data:`WARM_UP`. The last step of a job is logged and not measured.

    Raises:
        UserError: the job cannot run here, has no such rank or too few steps, or was interrupted.
    """
    job, needed = prepared(job, rank), WARM_UP + steps + 1
    if job.steps < needed:
        why = f"a measurement of {steps} steps takes {needed}"
        raise UserError(job.config.problem("training.steps", why, f"set training.steps = {needed}, or measure fewer steps"))
    engine = _RealRank(rank, steps)
    with simulating(engine):
        train(job, [engine])
    if engine.memory is None:
        raise UserError.one("the measurement", "was ended before its last step", "repeat it")
    seconds = engine.seconds / steps
    return MeasuredRank(
        rank, job.mesh.world_size, str(job.mesh), engine.device, steps, seconds, median(engine.host),
        job.batch.tokens_per_step / job.mesh.world_size / seconds, engine.memory,
    )  # fmt: skip


@dataclass(eq=False)  # the plugin manager hashes observers
class _RealRank:
    """See :class:`titan_core.toolkit.simulation.Simulation`."""

    rank: int
    steps: int
    checks_model: bool = False
    computes: bool = True
    seconds: float = 0.0
    host: list[float] = field(default_factory=list)
    device: str = ""
    memory: Memory | None = None

    @contextmanager
    def join(self, job: AssembledJob) -> Iterator[World]:
        """See :meth:`titan_core.toolkit.simulation.Simulation.join`."""
        with fake_world(self.rank, job.mesh, choose_device(job.config.section(JobSection).device)) as world:
            self._world, self.device = world, device_name(world.device)
            yield world

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Count the memory from here: what building a model takes is not that of a step."""
        if run.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.world.device)

    @hookimpl(tryfirst=True)
    def titan_step_start(self, step: int) -> None:
        """Start the clocks."""
        if step == WARM_UP + 1:
            synchronize(self._world.device)
            self._began = time.perf_counter()
        self._issued = time.perf_counter()

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Read the clocks."""
        if WARM_UP < report.step <= WARM_UP + self.steps:
            self.host.append(time.perf_counter() - self._issued)
        if report.step == WARM_UP + self.steps:
            synchronize(self._world.device)
            self.seconds = time.perf_counter() - self._began
            self.memory = memory(self._world.device)

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Forget what was measured of a run that has failed."""
        if end.failed:
            self.memory = None
