"""``titan statistics RUN --now``: a run that goes on writes statistics of its next step."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.gloo_pool import GlooPool
from harness.jobs import TINY, run_recipe
from titan_core.cli.main import main
from titan_core.hookspecs import hookimpl
from titan_core.metrics.json_lines import read_lines
from titan_debug.statistics.read import read_statistics

FOLDER = Path("run/debug/statistics")
PATIENCE = 60.0


class Patient:
    """Has training wait for the request."""

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while step == 3 and not (FOLDER / "requested").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if step == 3:
            time.sleep(1.0)  # rank 0 looks once a second


def trained(folder: str) -> list[float]:
    os.chdir(folder)
    settings = {**TINY, "training.steps": 8, "job.dump_folder": "run"}
    return run_recipe("llama3_debug", settings, observers=[Patient()]).losses


def test_a_running_job_writes_them_when_asked(gloo: GlooPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "run/events.jsonl"
    with ThreadPoolExecutor(1) as beside:
        run = beside.submit(gloo.run, 2, trained, str(tmp_path))
        deadline = time.monotonic() + PATIENCE
        while not (run.done() or (events.exists() and events.read_text())) and time.monotonic() < deadline:
            time.sleep(0.05)
        status = main(["statistics", str(tmp_path / "run"), "--now", "--json"])
        assert all(len(losses) == 8 for losses in run.result())
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert "waiting for the next step of 2 ranks" in captured.err
    shown = json.loads(captured.out)
    steps = read_statistics(tmp_path / FOLDER)
    assert list(steps) == [shown["step"]]  # one step's, of both ranks
    assert set(shown["outputs"]) == set(steps[shown["step"]].outputs) and "layers.1" in shown["outputs"]
    records = [read_lines(tmp_path / FOLDER / f"rank-{rank}.jsonl") for rank in range(2)]
    assert [len(of_rank) for of_rank in records] == [1, 1]
    (finding,) = (event for event in read_lines(events) if event["event"] == "finding")
    assert (finding["kind"], finding["step"]) == ("statistics", shown["step"])


def test_a_run_that_has_ended_is_not_asked(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe("llama3_debug", {**TINY, "job.dump_folder": "run"})
    assert not FOLDER.exists()  # nobody has asked
    assert main(["statistics", "run", "--now"]) == 2
    assert "is not going on" in capsys.readouterr().err
    assert main(["statistics", "run"]) == 2
    assert "--now" in capsys.readouterr().err


def test_one_that_does_not_answer_in_time_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    start = {"event": "start", "time": time.time(), "step": 0, "steps": 5, "world_size": 2, "mesh": {}, "processes": []}
    (run / "events.jsonl").write_text(json.dumps(start) + "\n")
    assert main(["statistics", str(run), "--now", "--wait", "0.3"]) == 2
    error = capsys.readouterr().err
    assert "no statistics have come from rank 0, 1 within 0.3 s" in error and "titan flight dump" in error
