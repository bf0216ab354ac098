"""A run ends with saved weights, however it ends, or says so at its start; and it names the command that resumes it."""

from __future__ import annotations

import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.plugin import titan_next_commands
from titan_ckpt.resume.position import with_overrides
from titan_core.api import RunEnd, hookimpl
from titan_core.cli.main import main
from titan_core.loop.training import train
from titan_testing.jobs import TINY, make_job

SAVED: dict[str, object] = {**TINY, "checkpoint.enable": "true", "training.steps": 5}
ENDS: dict[str, tuple[dict[str, object], int]] = {
    "interval beyond the last step": ({"checkpoint.interval": 500}, 5),
    "interval that misses the last step": ({"checkpoint.interval": 2}, 5),
    "in the background": ({"checkpoint.async_mode": "async", "checkpoint.interval": 2}, 5),
    "weights only": ({"checkpoint.last_save_model_only": "true"}, 5),
    "one checkpoint kept": ({"checkpoint.keep_latest_k": 1, "checkpoint.interval": 1}, 5),
    "stopped at a step": ({"training.stop_at_step": 3}, 3),
    "stopped before the first step": ({"training.stop_at_step": 0}, 0),
    "saved elsewhere": ({"checkpoint.folder": "elsewhere"}, 5),
    "preempted": ({"harness": "SIGTERM"}, 2),
}


class Preempts:
    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("name", ENDS)
def test_weights_of_the_last_step_are_saved(name: str, in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes, step = ENDS[name]
    changes = {**changes}
    observers = [Preempts()] if changes.pop("harness", None) else []
    end = train(make_job("tiny", {**SAVED, **changes}), observers)
    assert end.step == step
    folder = Path("outputs/tiny", str(changes.get("checkpoint.folder", "checkpoint")))
    assert (folder / f"step-{step}/checkpoint.json").exists()
    assert "saved: " not in caplog.text


def test_a_run_without_checkpoints_names_the_key_at_its_start(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    warned: list[bool] = []

    class Start:
        @hookimpl(trylast=True)
        def titan_train_start(self) -> None:
            warned.append("the trained weights will not be saved: set checkpoint.enable = true" in caplog.messages)

    train(make_job("tiny", TINY), [Start()])
    assert warned == [True]


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        (["train"], ["train", "--training.steps", "8"]),
        (["train", "my.toml", "--training.steps", "4", "--a.b"], ["train", "my.toml", "--a.b", "--training.steps", "8"]),
        (["train", "--training.steps=4", "--a.b", "-1"], ["train", "--a.b", "-1", "--training.steps", "8"]),
    ],
)
def test_an_override_takes_the_place_of_an_earlier_one(given: list[str], changed: list[str]) -> None:
    assert list(with_overrides(given, {"training.steps": 8})) == changed


def resume(changes: dict[str, object], end: RunEnd, **facts: Any) -> list[tuple[str, ...]]:
    job = make_job("tiny", {**SAVED, **changes})
    command = facts.pop("command", ("train", "tiny"))
    end = replace(end, **{"checkpoint": "c/step-5", **facts})
    return [one.arguments for one in titan_next_commands(job, end, command)]


def test_a_complete_run_can_train_further_and_a_stopped_one_to_its_end() -> None:
    done = RunEnd(5, True, "")
    assert resume({}, done) == [("train", "tiny", "--training.steps", "10")]
    stopped = resume({"training.stop_at_step": 3}, RunEnd(3, False, ""))
    assert stopped == [("train", "tiny", "--training.stop_at_step", "5")]
    older = resume({"checkpoint.load_step": 2}, done)
    assert older == [("train", "tiny", "--training.steps", "10", "--checkpoint.load_step", "-1")]
    assert resume({"checkpoint.last_save_model_only": "true"}, done) == []
    assert resume({}, done, checkpoint=None) == resume({}, done, command=None) == []
    assert resume({}, RunEnd(4, False, "the dataset has ended")) == []


def test_the_command_that_a_run_prints_resumes_it(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    command = ["train", "tiny", *(text for key, value in SAVED.items() for text in (f"--{key}", str(value)))]
    steps = []
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["titan", *command])
        assert main(command) == 0
        printed = capsys.readouterr().out
        (line,) = [line for line in printed.splitlines() if line.startswith("  train further  ")]
        command = shlex.split(line.removeprefix("  train further  "))[1:]
        steps.append(command[command.index("--training.steps") + 1])
    assert steps == ["10", "20"] and "resumed    after step 5" in printed
    monkeypatch.setattr("sys.argv", ["titan", *command])
    assert main([*command[:-1], "10"]) == 0
    assert "nothing to train: all 10 steps were done before" in capsys.readouterr().out
