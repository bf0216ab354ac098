"""``titan statistics RUN --now``: a running job writes statistics of its next step."""

from __future__ import annotations

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from titan_core.api import hookimpl
from titan_core.cli.main import main
from titan_core.toolkit.json_lines import read_lines
from titan_core.toolkit.processes import pid_namespace
from titan_debug import request
from titan_debug.numerics.statistics import AddedStatistics, read_statistics
from titan_debug.request import send_request
from titan_testing import PATIENCE
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, run_recipe

FOLDER = Path("run/debug/statistics")


class Patient:
    """Makes training wait for the request."""

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while step == 3 and not (FOLDER / "requested").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if step == 3:
            time.sleep(1.0)  # rank 0 polls once a second


def trained(folder: str) -> list[float]:
    os.chdir(folder)
    settings = {**TINY, "training.steps": 8, "job.dump_folder": "run"}
    return run_recipe("tiny", settings, observers=[Patient()]).losses


@pytest.mark.full
def test_a_running_job_writes_statistics_on_request(
    gloo: GlooPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = tmp_path / "run/events.jsonl"
    with ThreadPoolExecutor(1) as executor:
        run = executor.submit(gloo.run, 2, trained, str(tmp_path))
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
    assert list(steps) == [shown["step"]]  # of one step
    assert set(shown["outputs"]) == set(steps[shown["step"]].outputs) and "layers.1" in shown["outputs"]
    records = [read_lines(tmp_path / FOLDER / f"rank-{rank}.jsonl") for rank in range(2)]
    assert [len(lines) for lines in records] == [1, 1]
    (finding,) = (event for event in read_lines(events) if event["event"] == "finding")
    assert (finding["kind"], finding["step"]) == ("statistics", shown["step"])


def test_a_run_that_has_ended_gets_no_request(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe("tiny", {**TINY, "job.dump_folder": "run"})
    assert not FOLDER.exists()  # nothing was requested
    assert main(["statistics", "run", "--now"]) == 2
    assert "is not running" in capsys.readouterr().err
    assert main(["statistics", "run"]) == 2
    assert "--now" in capsys.readouterr().err


def running(run: Path, **more: object) -> Path:
    """Write the files of a running job of two ranks."""
    folder = run / "debug/statistics"
    folder.mkdir(parents=True)
    begun = {"event": "start", "time": time.time(), "step": 0, "steps": 5, "world_size": 2, "mesh": {}, "processes": []}
    (run / "events.jsonl").write_text(json.dumps({**begun, **more}) + "\n")
    return folder


def line(step: int, attempt: float, elements: int = 1) -> str:
    outputs = {"tok_embeddings": [elements, 1.0, 1.0, 1.0, 0]}
    record = {"step": step, "attempt": attempt, "places": {"tok_embeddings": [0, 0]}, "outputs": outputs, "gradients": {}}
    return json.dumps(record) + "\n"


def test_the_answer_is_a_step_that_all_ranks_have_written_after_the_request(tmp_path: Path) -> None:
    """Neither a later step of an earlier attempt nor a step that some ranks have yet to write."""
    folder = running(tmp_path / "run")
    files = [folder / f"rank-{rank}.jsonl" for rank in range(2)]
    for file in files:
        file.write_text(line(7, 1.0))
    added = AddedStatistics(folder, 2)
    assert added.missing() == [0, 1]
    files[0].open("a").write(line(5, 2.0))
    assert added.missing() == [1]
    files[0].open("a").write(line(6, 2.0) + '{"to')
    files[1].open("a").write(line(5, 2.0))
    assert added.missing() == []
    (answer,) = added.steps().items()
    assert answer[0] == 5 and answer[1].outputs["tok_embeddings"].count == 2


def test_a_run_that_was_killed_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = {"host": socket.gethostname(), "pid": 2**22 + 1, "pid_namespace": pid_namespace()}
    running(tmp_path / "run", processes=[here])
    for command in ("statistics {} --now", "flight dump {}"):
        assert main(command.format(tmp_path / "run").split()) == 2
        assert "is not running: its process was killed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rank-0.jsonl", "", "contains no statistics"),
        ("rank-0.jsonl", '{"st', "contains no statistics"),
        ("rank-0-copy.jsonl", line(1, 1.0), "contains no statistics"),
        ("rank-0.jsonl", '{"a": 1}\n', "rank-0.jsonl:1: invalid record: it lacks a valid 'step' or 'attempt'"),
        ("rank-0.jsonl", line(1, 1.0).replace("[0, 0]", "0").replace("[1, 1", "[true, 1"), "is not a list of 5 numbers"),
        ("rank-0.jsonl", None, "cannot be read"),
    ],
)
def test_files_without_statistics(
    tmp_path: Path, name: str, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = running(tmp_path / "run") / name
    if text is None:
        file.mkdir()
    else:
        file.write_text(text)
    assert main(["statistics", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def test_statistics_that_could_not_be_written_are_written_with_the_next_request(
    in_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Asks:
        @hookimpl
        def titan_step_start(self, step: int) -> None:
            if step in (2, 4):
                send_request(FOLDER, "me")
                if step == 4:
                    (FOLDER / "rank-0.jsonl").rmdir()  # the obstacle

    (in_tmp / "run").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "STEP_POLL_SECONDS", 0.0)

        class Blocks:
            @hookimpl
            def titan_train_start(self) -> None:
                (FOLDER / "rank-0.jsonl").mkdir(parents=True)

        run_recipe("tiny", {**TINY, "training.steps": 6, "job.dump_folder": "run"}, observers=[Asks(), Blocks()])
    assert "rank-0.jsonl cannot be written: Is a directory" in caplog.text
    assert list(read_statistics(FOLDER)) == [2, 4]  # the line that could not be written was kept
    findings = [event for event in read_lines(Path("run/events.jsonl")) if event["event"] == "finding"]
    assert [(event["kind"], event["step"]) for event in findings] == [("statistics", 4)]


def test_a_run_that_does_not_answer_in_time_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    running(run)
    assert main(["statistics", str(run), "--now", "--wait", "-1"]) == 2
    assert "is not a number of seconds from 0.01 to 2592000" in capsys.readouterr().err
    assert main(["statistics", str(run), "--now", "--wait", "0.3"]) == 2
    error = capsys.readouterr().err
    assert "received no statistics from ranks 0-1 within 0.3 s" in error and "titan flight dump" in error
