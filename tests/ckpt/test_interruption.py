"""An interrupted run saves a checkpoint and can be resumed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from titan_core.api import hookimpl
from titan_core.loop.training import train
from titan_testing.jobs import TINY, make_job, run_recipe


class Interrupts:
    """Sends SIGINT to this process in a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_run_finishes_its_step_saves_and_resumes_bit_for_bit(in_tmp: Path) -> None:
    whole = run_recipe("tiny", {**TINY, "job.dump_folder": "whole"})
    resumable = {**TINY, "checkpoint.enable": "true", "checkpoint.interval": 100, "job.dump_folder": "run"}
    end = train(make_job("tiny", resumable), [Interrupts(2)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (end.interrupted, end.failed, end.completed, end.preempted) == (True, False, False, False)
    assert (in_tmp / f"run/checkpoint/step-{end.step}/checkpoint.json").exists()
    events = [json.loads(line) for line in (in_tmp / "run/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] != "spent"] == ["start", "checkpoint", "end"]
    assert events[-1]["interrupted"] and not events[-1]["failed"]
    assert whole.losses[: end.step] + run_recipe("tiny", resumable).losses == whole.losses
