"""Runs of two ranks with a fault, and the analysis of their dumps."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from titan_core.api import UserError, hookimpl
from titan_debug.flight.diagnose import Analysis, analyse
from titan_debug.flight.dump import read_dumps
from titan_debug.request import send_request
from titan_testing import PATIENCE
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe

RUN: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 2, ffn_dim = 64}",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.steps": 5,
    "lr_scheduler.warmup_steps": 2,
    "job.device": "cpu",
    "job.dump_folder": "run",
    "comm.watchdog_seconds": 1,
    "comm.train_timeout_seconds": 4,
}

AT = 3
"""The step with the fault."""

FLIGHT = Path("run/debug/flight")

SEEN = Path("run/debug/flight-of-the-fault")
"""A copy of the dumps of the fault. A later step that is slow on a busy machine would overwrite them."""

PATIENT: dict[str, object] = {"comm.train_timeout_seconds": int(1.5 * PATIENCE), "comm.watchdog_seconds": 4}
"""Settings for faults that wait for the watchdogs: only the fault makes a step late, not a busy machine."""


class Fault:
    """An observer that calls a function at step :data:`AT`, on each rank."""

    def __init__(self, act: Callable[[int, int], object]) -> None:
        self._act = act

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        if step == AT or (step == AT + 1 and self._act is sleeps_again):
            self._act(dist.get_rank(), step)


def dumped(step: int) -> bool:
    """Return whether both ranks have dumped ``step``."""
    files = [FLIGHT / f"rank-{rank}.json" for rank in range(2)]
    return all(file.exists() and json.loads(file.read_text())["step"] == step for file in files)


def sleeps(rank: int, step: int) -> None:
    """Sleep on rank 1 until the watchdogs have dumped the step, however busy the machine is."""
    if rank == 0:
        return
    deadline = time.monotonic() + PATIENCE
    while not dumped(step) and time.monotonic() < deadline:
        time.sleep(1)
    shutil.copytree(FLIGHT, SEEN, dirs_exist_ok=True)


def sleeps_again(rank: int, step: int) -> None:
    """Sleep in two consecutive steps."""
    sleeps(rank, step)


def asks(rank: int, step: int) -> None:
    """Request a dump of a healthy run, as `titan flight dump` does."""
    if rank == 0:
        send_request(FLIGHT, "a person asks")
    deadline = time.monotonic() + PATIENCE
    while not (FLIGHT / f"rank-{rank}.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def run_with(folder: str, fault: Callable[[int, int], object], overrides: dict[str, object]) -> str:
    """Train with a fault; return how the run ended on this rank."""
    os.chdir(folder)
    try:
        return run_recipe("tiny", {**RUN, **overrides}, observers=[Fault(fault)]).reason
    except (RuntimeError, UserError) as error:
        return f"{type(error).__name__}: {error}"


def analysed(
    gloo: GlooPool, folder: Path, fault: Callable[[int, int], object], more: dict[str, object] | None = None
) -> tuple[list[str], Analysis]:
    """Train with a fault; return how the run ended on each rank, and the analysis of the dumps of the fault."""
    ends = gloo.run(2, run_with, str(folder), fault, more or {})
    dumps = folder / SEEN
    return ends, analyse(read_dumps(dumps if dumps.exists() else folder / FLIGHT))
