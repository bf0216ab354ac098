"""What is said of the step after which a run ended."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from titan_core.api import RunEnd
from titan_core.loop.results import end_of_run
from titan_core.runlog.console import ConsoleLog


def stopped_by_sigterm(agreed: bool) -> Any:
    never = SimpleNamespace(agreed=False)
    return SimpleNamespace(interrupt=never, stop=SimpleNamespace(agreed=agreed), cause="SIGTERM")


@pytest.mark.parametrize(("step", "reason"), [(0, "SIGTERM: stopped, to be started again"), (1, "SIGTERM: stopped after a")])
def test_sigterm_before_the_first_step_ends_no_step(step: int, reason: str) -> None:
    interruption = stopped_by_sigterm(True)
    job: Any = SimpleNamespace(steps=10, end_step=10)
    end = end_of_run(step, 10, job, interruption)
    assert end.preempted and end.reason.startswith(reason)


@pytest.mark.parametrize(
    ("step", "stopped", "reason"),
    [(4, False, "stage 'long' is complete"), (4, True, "SIGTERM: stopped after"), (3, False, "the dataset has ended")],
)
def test_the_end_of_a_stage_is_no_end_of_the_run(step: int, stopped: bool, reason: str) -> None:
    interruption = stopped_by_sigterm(stopped)
    job: Any = SimpleNamespace(steps=10, end_step=4, stage=0, stages=[SimpleNamespace(name="long")])
    end = end_of_run(step, 4, job, interruption)
    assert not end.completed and end.preempted == stopped and end.reason.startswith(reason)


@pytest.mark.parametrize(("step", "where"), [(0, "ended before the first step of 10"), (3, "ended after step 3 of 10")])
def test_the_console_names_the_step(step: int, where: str) -> None:
    printed: list[str] = []
    console: Any = SimpleNamespace(
        _open=ExitStack(), _run=SimpleNamespace(step=0, steps=10, dump_folder="run"), _print=printed.append
    )
    ConsoleLog.titan_train_end(console, RunEnd(step, completed=False, reason="why"))
    assert printed == [f"{where}: why; config, plugins and metrics are in run"]
