"""The reports of a step to observers, and their order."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.jobs import TINY, run_recipe
from titan_core.api.hookspecs import hookimpl
from titan_core.data.loader import DataLoader


class LosesGradients:
    """Drops gradients of some parameters, as a defect in a parallelism would."""

    def __init__(self, steps: dict[int, str]) -> None:
        self.steps, self.step = steps, 0

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        for name, parameter in run.parts[0].module.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self.drop, name))

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self.step = step

    def drop(self, name: str, parameter: torch.Tensor) -> None:
        if name.startswith(self.steps.get(self.step, "-")):
            parameter.grad = None


def test_parameters_without_a_gradient_are_reported_once_by_name(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    loses = LosesGradients({2: "norm", 3: "layers.1.feed_forward", 4: "norm"})
    run_recipe("tiny", TINY, observers=[loses])
    reports = [record.getMessage() for record in caplog.records if "no gradient" in record.getMessage()]
    assert len(reports) == 2
    assert reports[0].startswith("step 2: 1 of 21 parameters received no gradient and are not trained: norm.weight;")
    names = ", ".join(f"layers.1.feed_forward.w{number}.weight" for number in (1, 2, 3))
    assert reports[1].startswith(f"step 3: 3 of 21 parameters received no gradient and are not trained: {names};")
    events = [json.loads(line) for line in Path("outputs/tiny/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event.get("kind") == "no gradient"] == [2, 3]


class Watches:
    """Sees whether a step has begun when its batch is loaded."""

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


def test_a_step_begins_before_its_batch_is_loaded(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watches = Watches()
    peek = DataLoader.peek

    def loads(loader: DataLoader) -> Any:
        watches.events.append("loads")
        return peek(loader)

    monkeypatch.setattr(DataLoader, "peek", loads)
    settings = {**TINY, "training.steps": 2}
    run_recipe("tiny", settings, observers=[watches])
    steps = [event for before, event in pairwise(["", *watches.events]) if event != before]  # a batch is read twice
    assert steps == ["start 1", "loads", "end 1", "start 2", "loads", "end 2"]
