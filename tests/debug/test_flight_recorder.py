"""Faults in real processes, and what the dumps say of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.gloo_pool import GlooPool
from harness.jobs import run_recipe
from titan_core.api.hookspecs import hookimpl
from titan_core.api.runs.files import EVENTS
from titan_core.data.loader import DataLoader
from titan_debug.flight.analysis import Analysis, analyse
from titan_debug.flight.read import read_dumps
from titan_debug.request import ask

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
"""The step that goes wrong."""
FLIGHT = Path("run/debug/flight")
SEEN = Path("run/debug/flight-of-the-fault")
"""The dumps of the fault: a later step, slow on a busy machine, is dumped over them."""
PATIENT: dict[str, object] = {"comm.train_timeout_seconds": 90, "comm.watchdog_seconds": 4}
"""For faults that wait for the watchdogs: only they make a step late, not a busy machine."""


class Fault:
    """Does something at a step, on each rank."""

    def __init__(self, act: Callable[[int, int], object]) -> None:
        self._act = act

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        if step == AT or (step == AT + 1 and self._act is sleeps_again):
            self._act(dist.get_rank(), step)


def dumped(step: int) -> bool:
    """Whether both ranks have dumped ``step``."""
    files = [FLIGHT / f"rank-{rank}.json" for rank in range(2)]
    return all(file.exists() and json.loads(file.read_text())["step"] == step for file in files)


def sleeps(rank: int, step: int) -> None:
    """Until the watchdogs have seen it, however busy the machine is."""
    if rank == 0:
        return
    deadline = time.monotonic() + 60
    while not dumped(step) and time.monotonic() < deadline:
        time.sleep(1)
    shutil.copytree(FLIGHT, SEEN, dirs_exist_ok=True)


def sleeps_again(rank: int, step: int) -> None:
    """In two steps, one after another."""
    sleeps(rank, step)


def raises(rank: int, step: int) -> None:
    if rank == 1:
        raise ValueError("the disk is on fire")


def waits_for_data(rank: int, step: int) -> None:
    """Rank 1's next batch takes as long to load as the watchdogs take to notice."""
    if rank == 1:
        patch = pytest.MonkeyPatch()
        peek = DataLoader.peek

        def slow(loader: DataLoader) -> object:
            patch.undo()
            sleeps(rank, step)
            return peek(loader)

        patch.setattr(DataLoader, "peek", slow)


def other_operation(rank: int, step: int) -> None:
    numbers = torch.ones(6)
    if rank == 1:
        dist.broadcast(numbers, src=0)
    else:
        dist.all_reduce(numbers)


def other_shape(rank: int, step: int) -> None:
    dist.all_reduce(torch.ones(6 if rank == 0 else 600))


def asks(rank: int, step: int) -> None:
    """As `titan flight dump` does; nothing is wrong."""
    if rank == 0:
        ask(FLIGHT, "a person asks")
    deadline = time.monotonic() + 60
    while not (FLIGHT / f"rank-{rank}.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def run_with(folder: str, fault: Callable[[int, int], object], overrides: dict[str, object]) -> str:
    """What the run ends with on this rank."""
    os.chdir(folder)
    try:
        return run_recipe("llama3_debug", {**RUN, **overrides}, observers=[Fault(fault)]).reason
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def analysed(
    gloo: GlooPool, folder: Path, fault: Callable[[int, int], object], more: dict[str, object] | None = None
) -> tuple[list[str], Analysis]:
    """What each rank ends with, and the verdict over the dumps of the fault."""
    ends = gloo.run(2, run_with, str(folder), fault, more or {})
    dumps = folder / SEEN
    return ends, analyse(read_dumps(dumps if dumps.exists() else folder / FLIGHT))


def test_a_rank_that_sleeps_is_found_while_training_continues(gloo: GlooPool, tmp_path: Path) -> None:
    ends, found = analysed(gloo, tmp_path, sleeps, PATIENT)
    assert ends == ["all steps are done"] * 2
    assert (found.kind, found.culprits, found.step) == ("behind", [1], AT)
    assert "rank 1 is behind in step 3: it is in time.sleep(1), at" in found.verdict
    assert re.search(
        r"test_flight_recorder\.py:\d+ in sleeps; rank 0 has waited \d+\.\d s for it in all_reduce", found.verdict
    )
    assert "of all ranks (dp_shard)" in found.verdict
    events = [json.loads(line) for line in (tmp_path / "run" / EVENTS).read_text().splitlines()]
    finding = next(event for event in events if event["event"] == "finding")  # a later step may be slow in earnest
    assert finding["kind"] == "hang" and "rank 1 is behind" in finding["message"]


def test_a_loader_that_hangs_is_found(gloo: GlooPool, tmp_path: Path) -> None:
    _, found = analysed(gloo, tmp_path, waits_for_data, PATIENT)
    assert (found.kind, found.culprits, found.step) == ("behind", [1], AT)
    assert "rank 1 is behind in step 3: it is in time.sleep(1), at" in found.verdict


def test_steps_that_are_always_slow_are_reported_once(gloo: GlooPool, tmp_path: Path) -> None:
    """Each is dumped, for the next may be the one that hangs."""
    ends, found = analysed(gloo, tmp_path, sleeps_again, {**PATIENT, "training.steps": AT + 1})
    assert ends == ["all steps are done"] * 2
    assert (found.kind, found.culprits, found.step) == ("behind", [1], AT + 1)
    events = [json.loads(line) for line in (tmp_path / "run" / EVENTS).read_text().splitlines()]
    assert [event["kind"] for event in events if event["event"] == "finding"] == ["hang"]


def test_a_rank_that_raises_is_distinguished_from_the_one_that_loses_it(gloo: GlooPool, tmp_path: Path) -> None:
    ends, found = analysed(gloo, tmp_path, raises)
    assert ends[1] == "ValueError: the disk is on fire"
    assert ends[0].startswith("RuntimeError")
    assert (found.kind, found.culprits, found.step) == ("raised", [1], AT)
    assert "rank 1 raised ValueError in step 3" in found.verdict and "in raises: the disk is on fire" in found.verdict
    assert "rank 0 was left waiting in all_reduce" in found.verdict


def test_a_mismatched_collective_is_named_with_both_calls(gloo: GlooPool, tmp_path: Path) -> None:
    ends, found = analysed(gloo, tmp_path, other_operation)
    assert all(end.startswith("RuntimeError") for end in ends)
    assert (found.kind, found.step) == ("mismatch", AT)
    assert "rank 0 calls all_reduce of [6] float32, called at" in found.verdict
    assert "rank 1 calls broadcast of [6] float32, called at" in found.verdict
    assert found.verdict.count("in other_operation") == 2


def test_a_rank_that_gloo_ends_leaves_where_it_was(tmp_path: Path) -> None:
    """gloo aborts a process that is sent more than it expects; these processes are nobody else's."""
    pool = GlooPool()
    try:
        with pytest.raises(RuntimeError, match="has died"):
            pool.run(2, run_with, str(tmp_path), other_shape, {})
        deadline = time.monotonic() + 60
        while not (tmp_path / FLIGHT / "rank-1.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        pool.close()
    found = analyse(read_dumps(tmp_path / FLIGHT))
    assert (found.kind, found.culprits, found.step) == ("died", [0], AT)
    assert "rank 0 died (Aborted)" in found.verdict and "in other_shape in step 3" in found.verdict
    assert "while rank 1 was in all_reduce" in found.verdict
    assert any("all_reduce of [600] float32" in line for line in found.details)


def test_a_job_that_is_well_dumps_when_asked_and_has_no_mismatch(gloo: GlooPool, tmp_path: Path) -> None:
    """Under two dimensions of the mesh, with a request of an earlier attempt in the folder."""
    ask(tmp_path / FLIGHT, "long ago", rank=1)
    axes: dict[str, object] = {**PATIENT, "parallelism.tensor_parallel_degree": 2, "training.local_batch_size": 4}
    ends, found = analysed(gloo, tmp_path, asks, axes)
    assert ends == ["all steps are done"] * 2
    assert found.kind in ("nothing", "behind", "elsewhere", "untold"), (
        found.verdict
    )  # a slow poll may catch one in its next collective
    assert {state.why for state in found.ranks} == {"a person asks"}
    assert all("tp" in "".join(group.label for group in dump.groups) for dump in read_dumps(tmp_path / FLIGHT).dumps)


def untroubled(folder: str) -> str:
    os.chdir(folder)
    return run_recipe("llama3_debug", {**RUN, "comm.watchdog_seconds": 0}).reason


def test_a_run_without_trouble_leaves_nothing(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(2, untroubled, str(tmp_path)) == ["all steps are done"] * 2
    assert not (tmp_path / "run" / "debug").exists()
