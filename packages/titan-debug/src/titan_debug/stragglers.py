"""Finds ranks that are persistently slower than the others.

Ranks wait for each other many times in a step, so that all steps take equally long, and only a rank's own work tells which
one the others wait for: the processor time of its training thread, the time that this thread was ready to run but had no
core, and the time that it waited for its data. These are measured without waiting for anything. Ranks exchange them in the
background, and read the answer a window of steps later. On GPUs this finds slow hosts and loaders; the work of the device is
not in it.
"""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from titan_core.api import Finding, JobContext, Run, StepReport, hookimpl
from titan_debug.config import CommTraceSection

log = logging.getLogger(__name__)

WINDOW = 20
"""Number of steps in one measurement."""
IN_A_ROW = 3
"""Number of successive windows in which a rank must be slow."""
LEAST_SECONDS = 0.005
"""Smallest difference, per step, that counts: others need not care about less."""


class Stragglers:
    """Measures on every rank, and reports on rank 0. A rank is reported again only after it was as fast as the others."""

    def __init__(self, context: JobContext[CommTraceSection]) -> None:
        self._ratio = context.section.straggler_ratio
        self._run: Run | None = None
        self._hosts: list[str] = []
        self._alike: list[Hashable] = []
        self._slow_windows: dict[int, int] = {}
        self._answer: Callable[[], Tensor] | None = None

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Learn the host of each rank, and which ranks do the same work: those of one pipeline stage."""
        world = run.world
        stage = tuple(world.coordinate(dim.name) for dim in world.plan.dims if dim.divides == "layers")
        gathered = world.gather((socket.gethostname(), stage))
        self._hosts, self._alike = [host for host, _ in gathered], [stage for _, stage in gathered]
        self._run = run
        self._begin()

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Count the step. At the end of a window, send this rank's figure, and read those of the window before."""
        run = self._run
        if run is None:
            return
        self._data += report.data_seconds
        self._steps += 1
        if self._steps < WINDOW:
            return
        if self._answer is not None:
            self._judge(run, self._answer().tolist(), report.step)
        mine = torch.zeros(run.world.size, dtype=torch.float64)
        mine[run.world.rank] = (thread_seconds() - self._began + self._data) / self._steps
        self._answer = run.world.sum_later(mine)
        self._begin()

    def _begin(self) -> None:
        self._began, self._data, self._steps = thread_seconds(), 0.0, 0

    def _judge(self, run: Run, seconds: Sequence[float], step: int) -> None:
        """Report the ranks that were slow in the last few windows."""
        slow = slow_ranks(seconds, self._alike, self._ratio)
        self._slow_windows = {rank: self._slow_windows.get(rank, 0) + 1 for rank in slow}
        for rank, median in slow.items():
            if self._slow_windows[rank] == IN_A_ROW and run.world.rank == 0:
                message = (
                    f"rank {rank} on {self._hosts[rank]} holds up the others: its own work takes {seconds[rank]:.3f} s a "
                    f"step, that of the median rank {median:.3f} s, over the last {IN_A_ROW * WINDOW} steps"
                )
                log.warning("%s", message)
                run.report(Finding("straggler", message, step))


def slow_ranks(seconds: Sequence[float], alike: Sequence[Hashable], ratio: float) -> Mapping[int, float]:
    """Return the slow ranks, each with the median of the ranks that do the same work.

    Args:
        seconds: own work per step, by rank.
        alike: equal for ranks that do the same work.
        ratio: the multiple of the median from which a rank is slow.
    """
    groups: dict[Hashable, list[float]] = {}
    for kind, one in zip(alike, seconds, strict=True):
        groups.setdefault(kind, []).append(one)
    # Of two ranks, the median_low is the faster one.
    medians = {kind: statistics.median_low(group) for kind, group in groups.items()}
    limits = {kind: max(ratio * median, median + LEAST_SECONDS) for kind, median in medians.items()}
    return {rank: medians[kind] for rank, kind in enumerate(alike) if seconds[rank] >= limits[kind]}


def thread_seconds() -> float:
    """Return the seconds that this thread has run, or was ready to run (on Linux; elsewhere only those that it has run)."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            run, ready, _ = file.read().split()
    except OSError:
        return time.thread_time()
    return (int(run) + int(ready)) / 1e9
