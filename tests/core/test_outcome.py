"""The destinations of a rank's error: the traceback goes to its log, one line to the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from titan_core.api import RunEnd, RunStopped, UserError
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.cli import train as command
from titan_core.cli.main import main
from titan_core.loop import training
from titan_core.loop.finite_guard import NonFiniteError
from titan_core.loop.outcome import OutcomeRecorder
from titan_core.toolkit.launching import OUTCOMES, Began


def burn() -> None:
    raise ValueError("https://user:s3cret@host is on fire\nand more")


def lose() -> None:
    raise RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:43699")


def refuse() -> None:
    raise UserError.one("the data", "it is damaged", "restore it")


def stop() -> None:
    raise RunStopped("step 3: the loss is nan")


def diverge() -> None:
    raise NonFiniteError("step 3: the loss is nan")


def fill_memory() -> None:
    bytearray(1 << 60)


LOG = "; the traceback is in run/logs/rank-1.log"
CASES = [
    (burn, 1, f"error: rank 1 in step 3: ValueError: https://(redacted)@host is on fire{LOG}"),
    (lose, 69, f"error: rank 1 in step 3: RuntimeError: [pair.cc:561] Connection closed by peer [127.0.0.1]:43699{LOG}"),
    (refuse, 2, "error: the data: it is damaged; restore it"),
    (stop, 1, "stopped: step 3: the loss is nan"),
    (diverge, 65, "stopped: step 3: the loss is nan"),
    (fill_memory, 71, f"error: rank 1 in step 3: MemoryError: {LOG}"),
]


def train_with(act: Any) -> Any:
    def train(job: AssembledJob, observers: list[Any], next_commands: bool, began: Began) -> None:
        (recorder,) = observers
        recorder.titan_step_start(3)
        try:
            act()
        except Exception as error:
            recorder.titan_train_end(RunEnd(3, False, "", error=error))
            raise

    return train


@pytest.mark.parametrize(("act", "status", "line"), CASES, ids=lambda case: getattr(case, "__name__", ""))
@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_prints_a_line_or_leaves_it_to_the_launcher(
    in_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    act: Any,
    status: int,
    line: str,
    launched: bool,
) -> None:
    if launched:
        monkeypatch.setenv(OUTCOMES, str(in_tmp))
    monkeypatch.setattr(training, "train", train_with(act))
    assert command._train_rank(cast(AssembledJob, SimpleNamespace(dump_folder="run")), 1) == status
    assert capsys.readouterr().err == ("" if launched else f"titan: {line}\n")
    log = in_tmp / "run/logs/rank-1.log"
    assert log.exists() == (act in (burn, lose, fill_memory))
    if log.exists():
        text = log.read_text()
        assert text.count("Traceback (most recent call last):") == 1 and f"in {act.__name__}" in text
        assert "step 3, process " in text.splitlines()[0] and "s3cret" not in text
    if launched:
        outcome = json.loads((in_tmp / "rank-1.json").read_text())
        assert (outcome["rank"], outcome["step"], outcome["follows"]) == (1, 3, act is lose)
        assert outcome["status"] == status


def test_a_log_that_cannot_be_written_goes_to_standard_error(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").write_text("in the way")
    recorder = OutcomeRecorder(0, "run")
    try:
        burn()
    except ValueError as error:
        recorder.failed(error)
    error_output = capsys.readouterr().err
    assert "run/logs/rank-0.log cannot be written: Not a directory" in error_output
    assert "Traceback (most recent call last):" in error_output
    assert recorder.outcome.log == ""


def test_titan_traceback_shows_tracebacks_of_ranks(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_TRACEBACK", "1")
    monkeypatch.setattr(training, "train", train_with(burn))
    with pytest.raises(ValueError, match="on fire"):
        command._train_rank(cast(AssembledJob, SimpleNamespace(dump_folder="run")), 1)


def test_one_process_ends_unexpected_errors_with_a_traceback(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "train", train_with(burn))
    with pytest.raises(ValueError, match="on fire"):
        main(["train", "tiny"])
    assert not Path("outputs/tiny/logs").exists()


def test_one_process_without_memory_shows_the_traceback_and_its_own_status(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "train", train_with(fill_memory))
    assert main(["train", "tiny"]) == 71
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):\n") and error.endswith("\nMemoryError\n")


@pytest.mark.parametrize("launched", [True, False])
def test_an_interrupt_at_the_start_of_a_rank_is_reported_once(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launched: bool
) -> None:
    def interrupt(argv: list[str]) -> int:
        raise KeyboardInterrupt

    if launched:
        monkeypatch.setenv(OUTCOMES, str(in_tmp))
    monkeypatch.setattr("titan_core.cli.main._run", interrupt)
    assert main([]) == 130
    assert capsys.readouterr().err == ("" if launched else "titan: interrupted\n")


@pytest.mark.parametrize("kind", [UserError, RunStopped])
def test_a_failed_run_with_a_checkpoint_says_how_to_resume(
    kind: type[Exception], in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = UserError.one("a shard", "cannot be read") if kind is UserError else RunStopped("a shard cannot be read")

    def fail(job: Any, observers: Any, **more: Any) -> None:
        observers[0].titan_checkpoint_saved(step=2, path="run/step-2")
        observers[0].titan_train_end(RunEnd(2, False, "", error=error))
        raise error

    monkeypatch.setattr(training, "train", fail)
    monkeypatch.setattr(sys, "argv", ["titan", "train", "tiny"])
    assert main(["train", "tiny"]) == (2 if kind is UserError else 1)
    failure, resume = capsys.readouterr().err.splitlines()[-2:]
    assert "a shard" in failure and resume.startswith("titan: to resume from the newest checkpoint: ")
    assert resume.endswith("titan train tiny")
