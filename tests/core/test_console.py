"""The console logger, on a terminal and in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.jobs import TINY, make_job
from titan_core.api.hookspecs import hookimpl
from titan_core.runlog.console import ConsoleLog
from titan_core.train.trainer import train


@pytest.mark.parametrize("terminal", [True, False])
def test_the_console(in_tmp: Path, terminal: bool) -> None:
    console = Console(force_terminal=terminal, width=160, record=True, file=(in_tmp / "out").open("w"), highlight=False)
    recorder = ConsoleRun(console)
    train(make_job("tiny", TINY), [recorder])
    text = console.export_text()
    assert "model      tiny debug" in text
    assert "batch      4 sequences of 32 tokens = 1 x 2 x 2" in text
    assert re.search(r"step 4/4 \| loss +\d\.\d{4} \| grad norm +\d\.\d{3} \| lr .* tokens/s \| mfu .*% \| memory", text)
    assert "done: 4 steps; config, plugins and metrics are in outputs/tiny" in text
    assert ("━" in (in_tmp / "out").read_text()) == terminal


class ConsoleRun:
    """A second console logger, whose output the test can read."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        from titan_core.api.metric_log import LoggerContext

        self.log = ConsoleLog(LoggerContext(section=None, facts=run.job.facts, run=run, device_name="CPU"), self.console)

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        self.log.titan_step_end(report)
        if report.step == 4:
            self.log.log({
                "step": 4, "loss": report.loss.item(), "grad_norm": 1.0, "lr": 0.1,
                "tokens_per_second": 1e4, "mfu": 0.5, "memory_peak_gib": 1.0,
            })  # fmt: skip

    @hookimpl
    def titan_train_end(self, end: Any) -> None:
        self.log.titan_train_end(end)
