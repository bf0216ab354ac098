"""Ranks that are persistently slower than the others are named."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.one_of_many import OneOfMany
from titan_core.api import Finding, hookimpl
from titan_debug import stragglers
from titan_debug.stragglers import slow_ranks, thread_seconds
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, run_recipe


@pytest.mark.parametrize(
    ("seconds", "alike", "slow"),
    [
        ([0.1, 0.1, 0.3, 0.1], "aaaa", {2: 0.1}),
        ([0.1, 0.3], "aa", {1: 0.1}),
        ([0.1, 0.14, 0.1, 0.1], "aaaa", {}),
        ([0.001, 0.004, 0.001, 0.001], "aaaa", {}),  # too little to matter
        ([0.1, 0.1, 0.4, 0.4], "aabb", {}),  # stages of a pipeline
        ([0.1, 0.1, 0.4, 0.9], "aabb", {3: 0.4}),
        ([0.1, 0.3], "ab", {}),
    ],
)
def test_a_rank_is_compared_with_those_that_do_the_same_work(seconds: list[float], alike: str, slow: Any) -> None:
    assert slow_ranks(seconds, alike, ratio=1.5) == slow


def test_a_rank_that_was_as_fast_as_the_others_in_between_is_not_reported() -> None:
    run, found = OneOfMany({"dp_shard": 3}), []
    watcher = stragglers.Stragglers(SimpleNamespace(section=SimpleNamespace(straggler_ratio=1.5)))  # type: ignore[arg-type]
    watcher._hosts, watcher._alike = ["a", "b", "c"], [0, 0, 0]
    start: Any = SimpleNamespace(world=run, report=lambda finding: found.append(finding.step))
    slow, fast = [0.1, 0.1, 0.3], [0.1, 0.1, 0.1]
    for step, seconds in enumerate([slow, slow, fast, slow, slow, slow, slow]):
        watcher._judge(start, seconds, step)
    assert found == [5]


def test_waiting_does_not_count_as_work() -> None:
    before, began = thread_seconds(), time.monotonic()
    time.sleep(0.2)
    # Of the time that passed, the busy machine may have kept the thread ready for any part, but for the sleep itself.
    assert thread_seconds() - before < time.monotonic() - began - 0.19


class Works:
    """Computes for longer on rank 1, and keeps the findings."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @hookimpl
    def titan_step_start(self) -> None:
        until = time.thread_time() + 0.3 * (os.environ["RANK"] == "1")
        while time.thread_time() < until:
            pass

    @hookimpl
    def titan_finding(self, finding: Finding) -> None:
        if finding.kind == "straggler":
            self.found.append(finding.message)


def findings(folder: str) -> list[str]:
    os.chdir(folder)
    window, stragglers.WINDOW = stragglers.WINDOW, 2
    observer = Works()
    try:
        run_recipe("tiny", {**TINY, "training.steps": 12}, observers=[observer])
    finally:
        stragglers.WINDOW = window
    return observer.found


@pytest.mark.full
def test_a_slow_rank_is_reported_once_with_its_host(gloo: GlooPool, tmp_path: Path) -> None:
    first, second = gloo.run(2, findings, str(tmp_path))
    assert len(first) == 1 and second == []
    assert first[0].startswith(f"rank 1 on {socket.gethostname()} holds up the others: its own work takes 0.")
