"""What a rank spends its time on."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from titan_core.api import RunEnd, World
from titan_core.runlog.event_log import EventLog
from titan_core.runlog.time_by_cause import SpentTime
from titan_core.toolkit.json_lines import read_lines
from titan_core.toolkit.launching import BEGAN, Began, began
from titan_core.toolkit.processes import process_began
from titan_testing.jobs import TINY, run_recipe


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Set the clocks of :class:`SpentTime`: seconds since an attempt that began at 1000."""
    now = [0.0]
    monkeypatch.setattr("titan_core.runlog.time_by_cause.time.perf_counter", lambda: 500 + now[0])
    monkeypatch.setattr("titan_core.runlog.time_by_cause.time.time", lambda: 1000 + now[0])
    return now


def test_causes_exclude_each_other_and_sum_to_the_time(clock: list[float]) -> None:
    clock[0] = 3.0
    spent = SpentTime(Began(900, 1000))
    clock[0] = 5.0
    spent.change("steps")
    clock[0] = 6.0
    with spent.on("save"):
        clock[0] = 8.0
        with contextlib.suppress(ValueError), spent.on("evaluation"):
            clock[0] = 12.0
            raise ValueError("of the body")
        clock[0] = 13.0
    clock[0] = 20.0
    assert spent.totals() == {"start": 5, "compile": 0, "steps": 8, "data": 0, "save": 3, "evaluation": 4}
    assert spent.elapsed() == 20


def test_waits_for_data_while_the_device_computes_are_steps(clock: list[float]) -> None:
    spent = SpentTime(Began(1000, 1000))
    spent.change("data")
    clock[0] = 4.0
    spent.change("steps")
    spent.limit_data(1.0)  # the device was idle for no more than that
    assert spent.totals()["data"] == 1 and spent.totals()["steps"] == 3
    spent.change("data")
    clock[0] = 6.0
    spent.limit_data(2.5)  # of the 2 s since
    assert spent.totals()["data"] == 3 and spent.totals()["steps"] == 3


def test_events_grow_with_the_logarithm_of_the_time(clock: list[float]) -> None:
    """Those of a month, and the time since the last one whenever the run is killed."""
    spent = SpentTime()
    times = [seconds for seconds in range(10, 30 * 86400) if spent.is_due(seconds)]
    assert len(times) < 6000
    for time_before, time_after in itertools.pairwise(times):
        assert time_after - time_before <= 1 + min(0.01 * time_after, max(60, 0.001 * time_after))


def test_rank_0_speaks_for_all_ranks_at_the_end(clock: list[float], tmp_path: Path) -> None:
    """Also after a failure, when the others are lost."""
    world = SimpleNamespace(
        rank=0, size=3, gather=lambda value: [value, (value[0], Began(990, 996)), value], sum=lambda tensor: 3 * tensor + 1
    )
    spent = SpentTime(Began(995, 998))
    log = EventLog(tmp_path, cast(World, world), spent)
    assert spent.began == Began(990, 996)
    spent.change("steps")
    clock[0] = 6.0
    log.log_spent(7)
    clock[0] = 8.0
    log.titan_train_end(RunEnd(9, False, "lost", error=ValueError("lost")))
    log.close()
    summed, last, _ = read_lines(tmp_path / "events.jsonl")
    assert (summed["step"], summed["seconds"]["start"], summed["seconds"]["steps"]) == (7, 3 * 4 + 1, 3 * 6 + 1)
    assert (last["step"], last["seconds"]["start"], last["seconds"]["steps"]) == (9, 13, 19 + 3 * 2)


def test_a_process_knows_when_it_began() -> None:
    before = time.time()
    code = "import time; time.sleep(0.5); from titan_core.toolkit.launching import began; print(*began())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert shown[0] == shown[1] and before - 0.1 <= float(shown[0]) <= before + 0.4
    assert process_began() == process_began() < before


def test_the_launcher_says_when_an_attempt_began(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Began(1700000000.125, 1700000300.5)
    monkeypatch.setenv(BEGAN, given.as_text())
    assert began() == given


def test_a_run_logs_what_it_spent_its_time_on(in_tmp: Path) -> None:
    before = time.time()
    run_recipe("tiny", {**TINY, "job.dump_folder": "run", "training.steps": 4, "metrics.log_freq": 1})
    events = read_lines(in_tmp / "run/events.jsonl")
    start, *found, last, end = [event for event in events if event["event"] in ("start", "spent", "end")]
    assert start["began"] == start["launched"] >= before - 1e-3
    assert found[0]["step"] == 1 and last["step"] == 4 and end["event"] == "end"
    for event in (*found, last):
        assert sum(event["seconds"].values()) == pytest.approx(event["time"] - start["began"], abs=0.1)
    assert last["seconds"]["start"] >= start["time"] - start["began"] - 0.1  # until the first step
    assert last["seconds"]["steps"] > 0
