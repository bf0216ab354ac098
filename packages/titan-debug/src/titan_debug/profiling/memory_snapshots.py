"""Snapshots of CUDA's memory with the history of its allocations: every so many steps, and when memory runs out."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from titan_core.api.build_context import JobContext
from titan_core.api.events import Finding, RunStart, StepReport
from titan_core.api.hookspecs import hookimpl
from titan_debug.config import ProfilingSection
from titan_debug.torch_private import CudaMemoryHistory
from titan_debug.whole_file import whole_file

log = logging.getLogger(__name__)

MOST_EVENTS = 100_000
"""Allocations and frees that are kept, the newest; each may take kilobytes of the host's memory."""


class MemorySnapshots:
    """Writes ``<save_memory_snapshot_folder>/step-N/rank-R.pickle`` in the run's directory, and below
    ``step-N-out-of-memory`` when memory ran out in step N."""

    def __init__(self, context: JobContext[ProfilingSection], history: CudaMemoryHistory | None = None) -> None:
        self._section = context.section
        self._history = history or CudaMemoryHistory()
        self._run: RunStart | None = None  # while there is a history
        self._step = 0

    @hookimpl
    def titan_train_start(self, run: RunStart) -> None:
        """Begin the history, if this rank is to have one and there is CUDA memory."""
        if self._section.ranks is not None and run.world.rank not in self._section.ranks:
            return
        if run.world.device.type != "cuda":
            log.warning(
                "profiling.enable_memory_snapshot records the allocations of GPUs, and this job trains on %s: no snapshots",
                run.world.device.type.upper(),
            )
            return
        self._history.start(MOST_EVENTS)
        self._run, self._step = run, run.step

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        """Remember the step, for when memory runs out in it."""
        self._step = step

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Write a snapshot every ``profile_freq`` steps."""
        if self._run is not None and report.step % self._section.profile_freq == 0:
            self._write(self._run, f"step-{report.step}")

    @hookimpl
    def titan_exception(self, error: BaseException) -> None:
        """Write a snapshot if memory has run out."""
        if self._run is not None and ran_out_of_memory(error):
            self._write(self._run, f"step-{self._step}-out-of-memory")

    @hookimpl
    def titan_train_end(self) -> None:
        """End the history."""
        if self._run is not None:
            self._run = None
            self._history.stop()

    def _write(self, run: RunStart, name: str) -> None:
        """Write a snapshot. A failure does not stop training: nothing depends on it."""
        path = Path(run.dump_folder, self._section.save_memory_snapshot_folder, name, f"rank-{run.world.rank}.pickle")
        try:
            with whole_file(path) as part:
                self._history.write(part)
        except OSError as error:
            log.error("memory snapshot %s cannot be written: %s; training continues", path, error.strerror or error)
            return
        log.info("wrote memory snapshot %s", path)
        if run.world.rank == 0:
            run.report(Finding("memory snapshot", f"{path}", self._step))


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from or during, says that a device's memory ran out."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        if isinstance(one, torch.OutOfMemoryError):
            return True
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
    return False
