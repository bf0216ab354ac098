"""The verdicts on faults in real processes."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.flights import AT, FLIGHT, PATIENT, RUN, analysed, asks, run_with, sleeps, sleeps_again
from titan_core.data.loader import DataLoader
from titan_core.toolkit.runs.files import EVENTS
from titan_debug.crash.report import Report
from titan_debug.flight.diagnose import analyse
from titan_debug.flight.dump import read_dumps
from titan_debug.flight.stacks import left_stacks
from titan_debug.request import send_request
from titan_testing import PATIENCE
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe


def raises(rank: int, step: int) -> None:
    if rank == 1:
        raise ValueError("the disk is on fire")


def waits_for_data(rank: int, step: int) -> None:
    """Rank 1's next batch takes as long to load as the watchdogs need to detect it."""
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


@pytest.mark.full
def test_a_rank_that_sleeps_is_found_while_training_continues(gloo: GlooPool, tmp_path: Path) -> None:
    ends, found = analysed(gloo, tmp_path, sleeps, PATIENT)
    assert ends == ["all steps are done"] * 2
    assert (found.kind, found.culprits, found.step) == ("behind", [1], AT)
    assert "rank 1 is behind in step 3: it is in time.sleep(1) at" in found.verdict
    assert re.search(
        r"flights\.py:\d+ in sleeps; rank 0 has waited \d+\.\d s for it in all_gather #\d+ on all ranks", found.verdict
    )
    assert "on all ranks (dp_shard)" in found.verdict
    events = [json.loads(line) for line in (tmp_path / "run" / EVENTS).read_text().splitlines()]
    finding = next(event for event in events if event["event"] == "finding")  # a later step may really be slow
    assert finding["kind"] == "hang" and "rank 1 is behind" in finding["message"]


@pytest.mark.full
def test_a_loader_that_hangs_is_found(gloo: GlooPool, tmp_path: Path) -> None:
    _, found = analysed(gloo, tmp_path, waits_for_data, PATIENT)
    assert (found.kind, found.culprits, found.step) == ("behind", [1], AT)
    assert "rank 1 is behind in step 3: it is in time.sleep(1) at" in found.verdict


@pytest.mark.full
def test_steps_that_are_always_slow_are_reported_once(gloo: GlooPool, tmp_path: Path) -> None:
    """Every slow step is dumped, because it may be the one that hangs."""
    ends, found = analysed(gloo, tmp_path, sleeps_again, {**PATIENT, "training.steps": AT + 1})
    assert ends == ["all steps are done"] * 2
    assert (found.kind, found.culprits, found.step) == ("behind", [1], AT + 1)
    events = [json.loads(line) for line in (tmp_path / "run" / EVENTS).read_text().splitlines()]
    assert [event["kind"] for event in events if event["event"] == "finding"] == ["hang"]


@pytest.mark.full
def test_only_the_ranks_that_lose_a_rank_dump(gloo: GlooPool, tmp_path: Path) -> None:
    ends, found = analysed(gloo, tmp_path, raises)
    assert "Fault.titan_step_start" in ends[1] and "raised ValueError: the disk is on fire" in ends[1]
    assert ends[0].startswith("RuntimeError")
    assert (found.kind, found.culprits, found.step) == ("missing", [1], AT)
    assert "rank 0 was left waiting in all_gather" in found.verdict
    report = Report.read(str(tmp_path / "run"))
    assert [crash.rank for crash in report.crashes] == [1, 0] and report.collectives is None


@pytest.mark.full
def test_a_mismatched_collective_is_named_with_both_calls(gloo: GlooPool, tmp_path: Path) -> None:
    ends, found = analysed(gloo, tmp_path, other_operation)
    assert all(end.startswith("RuntimeError") for end in ends)
    assert (found.kind, found.step) == ("mismatch", AT)
    assert "rank 0 called all_reduce of [6] float32 at" in found.verdict
    assert "rank 1 called broadcast of [6] float32 at" in found.verdict
    assert found.verdict.count("in other_operation") == 2


@pytest.mark.full
def test_a_rank_that_gloo_aborts_leaves_its_stack(tmp_path: Path) -> None:
    """gloo aborts a process that receives more than it expects, so this test uses its own processes."""
    pool = GlooPool()
    try:
        with pytest.raises(RuntimeError, match="has died"):
            pool.run(2, run_with, str(tmp_path), other_shape, {})
        deadline = time.monotonic() + PATIENCE
        while not (tmp_path / FLIGHT / "rank-1.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        pool.close()
    found = analyse(read_dumps(tmp_path / FLIGHT))
    assert (found.kind, found.culprits, found.step) == ("missing", [0], AT)
    assert "rank 1 was left waiting in all_reduce" in found.verdict
    assert any("all_reduce of [600] float32" in line for line in found.details)
    died = left_stacks(tmp_path / FLIGHT, [])[0]
    assert (died.rank, died.died) == (0, True)
    assert "Fatal Python error: Aborted" in died.text and "in other_shape" in died.text


@pytest.mark.full
def test_a_healthy_job_dumps_on_request_and_shows_no_mismatch(gloo: GlooPool, tmp_path: Path) -> None:
    """A request of an earlier attempt in the folder has no effect."""
    send_request(tmp_path / FLIGHT, "long ago", rank=1)
    ends, found = analysed(gloo, tmp_path, asks, PATIENT)
    assert ends == ["all steps are done"] * 2
    assert found.kind in ("nothing", "behind", "elsewhere", "not recorded"), (
        found.verdict
    )  # a slow poll may find a rank in its next collective
    assert {state.why for state in found.ranks} == {"a person asks"}


def untroubled(folder: str) -> str:
    os.chdir(folder)
    return run_recipe("tiny", {**RUN, "comm.watchdog_seconds": 0}).reason


def test_a_run_without_problems_leaves_no_files(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(2, untroubled, str(tmp_path)) == ["all steps are done"] * 2
    assert not (tmp_path / "run" / "debug").exists()
