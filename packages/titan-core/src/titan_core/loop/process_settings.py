"""Settings of the process during a job: numerics and seeds, timeouts of collectives, threads of operators."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_core.api import Run, StepReport, World, hookimpl
from titan_core.api.config.sections import CommSection, TrainingSection
from titan_core.api.parallel.world import BACKGROUND
from titan_core.torch_private import process_groups

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable without which cuBLAS refuses deterministic products."""


@contextmanager
def numerics_as_before() -> Iterator[None]:
    """Undo, however the block ends, what :func:`prepare_numerics` has set for the whole process, except the seeds. A job
    that is deterministic, or less precise, would otherwise make the next job of the process so."""
    deterministic = torch.utils.deterministic
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # as below
    workspace = os.environ.get(_WORKSPACE)
    try:
        yield
    finally:
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        torch.set_float32_matmul_precision(precision)
        if (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()) != before:
            # Not always: this imports torch's compiler, which takes seconds.
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark


def prepare_numerics(training: TrainingSection, world: World) -> None:
    """Set matmul precision, determinism, and seed the global generators, from which a model may draw in training (dropout).

    Weights and data do not depend on these generators. Ranks that see the same tokens get the same seed.
    """
    torch.set_float32_matmul_precision(training.float32_matmul_precision)
    if training.deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling new memory takes time, and nothing here reads uninitialised memory.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (a property that type checkers do not know)
        torch.backends.cudnn.benchmark = False
    seed = (training.seed * 1_000_003 + world.data_rank) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)


SETTABLE = {"gloo", "nccl"}
"""Backends whose timeout can be set. For others, such as the fake backend, torch 2.11 raises and torch 2.15 warns."""


class CollectiveTimeouts:
    """Sets the timeouts of ``[comm]`` on all existing process groups, including those of the mesh. Groups made after the
    first step keep the timeout that they were made with."""

    def __init__(self, section: CommSection) -> None:
        self._section = section
        self._shortened = False

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Set the initial timeout. Groups of the mesh were made with torch's default, not with that of the first group."""
        _set_timeouts(self._section.init_timeout_seconds)

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Set the shorter timeout after the first step, when everything is built and compiled."""
        if not self._shortened:
            self._shortened = True
            _set_timeouts(self._section.train_timeout_seconds)


def _set_timeouts(seconds: int) -> None:
    """Set the timeout of every process group of this rank, except the groups that work in the background.

    ``ProcessGroup.set_timeout`` is undocumented (torch 2.11 to 2.15; checked with gloo).
    """
    for group in process_groups():
        backends = {entry.partition(":")[2] for entry in dist.get_backend_config(group).split(",")}
        if backends <= SETTABLE and group.group_desc != BACKGROUND:
            group.set_timeout(timedelta(seconds=seconds))


@contextmanager
def only_this_thread_has_a_team() -> Iterator[None]:
    """Let operators that any other thread calls, of Python or of C++, run in that thread alone.

    On the CPU, torch divides an operator over a team of OpenMP threads, and each thread that calls operators has its own
    team. Once there are more threads in teams than cores, libgomp's threads no longer spin while they wait for work but
    sleep, and each operator of a step waits until they have woken up. That costs up to a third of the speed, as long as the
    second team lives. The threads of gloo, which copy what the ranks exchange, live as long as their group.

    A thread takes over the process's number of threads with its first operator, and keeps it. Threads that have called an
    operator before are therefore as before. So is, of other threads, a matrix product that is the first thing they compute:
    MKL does not ask torch for the number.
    """
    if torch.get_num_threads() == 1 or "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        yield
        return
    _set_for_new_threads(1)
    try:
        yield
    finally:
        _set_for_new_threads(torch.get_num_threads())


def _set_for_new_threads(number: int) -> None:
    """Set the number of threads for threads that have not called an operator yet, and leave that of this thread."""
    # What OpenMP and MKL are told holds for the thread that calls, and what torch remembers for all that come later.
    thread = threading.Thread(target=torch.set_num_threads, args=(number,), name="number of threads")
    thread.start()
    thread.join()
