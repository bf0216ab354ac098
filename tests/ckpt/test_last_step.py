"""The last step of a run is saved, even if it is known only when the data ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan_core.api import hookimpl
from titan_testing.jobs import TINY, run_recipe


class Events:
    """Records when steps start, end and are cancelled."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self.events.append(f"start {step}")

    @hookimpl
    def titan_step_cancelled(self, step: int) -> None:
        self.events.append(f"cancelled {step}")

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        self.events.append(f"end {report.step}")


def test_a_step_without_data_is_cancelled_and_the_last_step_is_saved(in_tmp: Path) -> None:
    settings = {
        **TINY, "training.dataset": "letters", "training.dataset_path": ",".join(["300"] * 8), "data.on_end": "stop",
        "training.steps": 500,
        "checkpoint.enable": "true", "checkpoint.interval": 2, "checkpoint.async_mode": "async",
    }  # fmt: skip
    events = Events()
    record = run_recipe("tiny", settings, observers=[events])
    last = len(record.losses)
    assert record.reason == "the dataset has ended" and last > 2
    assert events.events[-2:] == [f"start {last + 1}", f"cancelled {last + 1}"]
    assert Path(f"outputs/tiny/checkpoint/step-{last}/checkpoint.json").exists()
