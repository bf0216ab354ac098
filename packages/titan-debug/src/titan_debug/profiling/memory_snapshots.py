"""Snapshots of CUDA memory with its allocation history, written periodically and when memory runs out."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from titan_core.api import Finding, JobContext, Run, RunEnd, StepReport, hookimpl
from titan_core.toolkit.atomic_write import atomic_write
from titan_debug.config import ProfilingSection
from titan_debug.torch_private import CudaMemoryHistory

log = logging.getLogger(__name__)

MOST_EVENTS = 100_000
"""Number of most recent allocations and frees to record. Each may take kilobytes of host memory."""


class MemorySnapshots:
    """Writes ``<save_memory_snapshot_folder>/step-N/rank-R.pickle`` in the run's directory, and
    ``step-N-out-of-memory/rank-R.pickle`` if memory runs out in step N."""

    def __init__(self, context: JobContext[ProfilingSection], history: CudaMemoryHistory | None = None) -> None:
        self._section = context.section
        self._history = history or CudaMemoryHistory()
        self._run: Run | None = None  # set while the history is recorded
        self._step = 0

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Start the history if this rank writes snapshots and trains on CUDA."""
        if self._section.ranks is not None and run.world.rank not in self._section.ranks:
            return
        if run.world.device.type != "cuda":
            log.warning(
                "profiling.enable_memory_snapshot has no effect: it records GPU allocations, but this job trains on %s",
                run.world.device.type.upper(),
            )
            return
        self._history.start(MOST_EVENTS)
        self._run, self._step = run, run.step

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        """Record the current step for an out-of-memory snapshot."""
        self._step = step

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Write a snapshot every ``profile_freq`` steps."""
        if self._run is not None and report.step % self._section.profile_freq == 0:
            self._write(self._run, f"step-{report.step}")

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Write a snapshot if memory ran out, and stop the history."""
        if self._run is not None:
            if end.error is not None and ran_out_of_memory(end.error):
                self._write(self._run, f"step-{self._step}-out-of-memory")
            self._run = None
            self._history.stop()

    def _write(self, run: Run, name: str) -> None:
        """Write a snapshot. A failure is logged and does not stop training."""
        path = Path(run.dump_folder, self._section.save_memory_snapshot_folder, name, f"rank-{run.world.rank}.pickle")
        try:
            with atomic_write(path) as part:
                self._history.write(part)
        except OSError as error:
            log.error("cannot write memory snapshot %s: %s; training continues", path, error.strerror or error)
            return
        log.info("wrote memory snapshot %s", path)
        if run.world.rank == 0:
            run.report(Finding("memory snapshot", f"{path}", self._step))


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or an exception in its chain of causes and contexts, reports that device memory ran out."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        linked = waiting.pop()
        if linked is None or id(linked) in seen:
            continue
        if isinstance(linked, torch.OutOfMemoryError):
            return True
        seen.add(id(linked))
        waiting += [linked.__cause__, linked.__context__]
    return False
