"""The console logger, on a terminal and in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from titan_core.api import JobContext, UserError, hookimpl
from titan_core.loop.training import train
from titan_core.runlog.console import ConsoleLog, format_line
from titan_core.toolkit.status import current_task, hide_all
from titan_testing.jobs import TINY, make_job


@pytest.fixture(autouse=True)
def _shown() -> None:
    hide_all(False)  # an interrupt hides the progress of this process, which may have tested one


def test_the_console(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = ConsoleRun()
    train(make_job("tiny", TINY), [recorder])
    text = capsys.readouterr().out
    assert "model      tiny debug" in text
    assert "batch      4 sequences of 32 tokens = 1 x 2 x 2" in text
    assert re.search(r"step 4/4 \| loss +\d\.\d{4} \| grad norm +\d\.\d{3} \| lr .* tokens/s \| mfu .*% \| memory", text)
    assert "done: 4 steps; config, plugins and metrics are in outputs/tiny" in text
    assert recorder.progress == [("tiny debug (37.0K)", 4, step) for step in (1, 2, 3, 4)]
    assert current_task() is None  # nothing is left behind


def test_the_end_of_a_failed_run_names_no_class(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is reported after it, in a line of its own."""
    with pytest.raises(UserError):
        train(make_job("tiny", TINY), [FailsAt(2)])
    ends = [line for line in capsys.readouterr().out.splitlines() if "stopped after" in line or "ended after" in line]
    assert ends == ["stopped after step 1 of 4; config, plugins and metrics are in outputs/tiny"]


class FailsAt:
    """An observer whose user made a mistake."""

    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        if step == self.step:
            raise UserError.one("a shard", "cannot be read", "restore it")


STEP = {
    "step": 120, "loss": 4.56781, "grad_norm": 12.345, "lr": 3e-4, "tokens_per_second": 1_234_567.0, "mfu": 0.512,
    "memory_peak_gib": 71.25,
}  # fmt: skip
VALIDATION = {"step": 120, "validation_loss": 4.56781, "validation_tokens": 1_000_000, "validation_seconds": 12.3}


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (None, "step  120/1000 | loss  4.5678 | grad norm  12.345 | lr 3.00e-04 | 1,234,567 tokens/s | mfu 51.2% "
               "| memory 71.25 GiB"),
        (200, "step  120/1000 | loss  4.5678 | grad norm  12.345 | lr 3.00e-04 | 1,234,567 tokens/s | mfu 51.2% "
              "| memory 71.25 GiB"),
        (100, "step  120/1000  loss  4.5678  1,234,567 tok/s  norm 12.345  lr 3.00e-04  mfu 51.2%  71.25 GiB"),
        (80, "step  120/1000  loss  4.5678  1,234,567 tok/s  norm 12.345  lr 3.00e-04"),
        (40, "step  120/1000  loss  4.5678"),
        (20, "step  120/1000  loss  4.5678"),
    ],
)  # fmt: skip
def test_a_line_fits_the_terminal(width: int | None, line: str) -> None:
    assert format_line(STEP, 1000, width) == line


def test_the_line_of_a_validation_fits_the_terminal() -> None:
    assert format_line(VALIDATION, 1000, 80) == "step  120/1000 | validation loss  4.5678 | 1,000,000 tokens in 12.3 s"
    assert format_line(VALIDATION, 1000, 50) == "step  120/1000  validation loss  4.5678  12.3 s"
    named = {key if key == "step" else f"{key}/averaged": value for key, value in VALIDATION.items()}
    assert format_line(named, 1000, 60) == "step  120/1000  validation loss  4.5678 (averaged)  12.3 s"


def test_metrics_of_the_objective_follow_the_loss() -> None:
    step = {**STEP, "objective/accuracy": 0.51239, "objective/margin": None}
    assert format_line(step, 1000).startswith("step  120/1000 | loss  4.5678 | accuracy 0.5124 | margin nan | grad norm")
    assert format_line(step, 1000, 55) == "step  120/1000  loss  4.5678  accuracy 0.5124"
    validation = {**VALIDATION, "objective/accuracy": 0.5}
    assert format_line(validation, 1000, 62) == "step  120/1000  validation loss  4.5678  accuracy 0.5  12.3 s"


class ConsoleRun:
    """A console logger, and what its progress bar shows."""

    def __init__(self) -> None:
        self.progress: list[tuple[str, float | None, float]] = []

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.log = ConsoleLog(JobContext(section=None, job=run.job))
        self.log.titan_train_start(run)

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        self.log.titan_step_end(report)
        progress = current_task()
        assert progress is not None
        self.progress.append((progress.description, progress.total, progress.completed))
        if report.step == 4:
            self.log.titan_metrics({
                "step": 4, "loss": report.loss.item(), "grad_norm": 1.0, "lr": 0.1,
                "tokens_per_second": 1e4, "mfu": 0.5, "memory_peak_gib": 1.0,
            })  # fmt: skip

    @hookimpl
    def titan_train_end(self, end: Any) -> None:
        self.log.titan_train_end(end)
