"""The reports of a step to observers, and their order."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_core.api import StepAbandoned, StepInput, StepReport, StepRunner, hookimpl
from titan_core.data.loader import DataLoader
from titan_core.loop import trainer
from titan_testing.jobs import TINY, run_recipe


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


class GivesUp:
    """Raises StepAbandoned in place of steps 2 and 3, once and twice."""

    def __init__(self, run: StepRunner) -> None:
        self._run, self.failures = run, {2: 1, 3: 2}

    def __call__(self, inputs: StepInput) -> torch.Tensor:
        loss = self._run(inputs)
        if self.failures.get(inputs.step, 0):
            self.failures[inputs.step] -= 1
            raise StepAbandoned
        return loss


@pytest.mark.parametrize(("frequency", "logged"), [(1, [1, 2, 3, 4]), (3, [1, 3, 4]), (10, [1, 4])])
def test_observers_know_which_steps_are_logged(in_tmp: Path, frequency: int, logged: list[int]) -> None:
    class Sees:
        def __init__(self) -> None:
            self.logged: list[int] = []

        @hookimpl
        def titan_step_end(self, report: StepReport) -> None:
            if report.logged:
                self.logged.append(report.step)

    sees = Sees()
    run_recipe("tiny", {**TINY, "metrics.log_freq": frequency, "job.dump_folder": "run"}, observers=[sees])
    assert sees.logged == logged
    assert [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()] == logged


def test_an_abandoned_step_is_computed_again_with_the_same_data(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_recipe("tiny", TINY, weights=True)
    build = trainer.build_step_runner
    monkeypatch.setattr(trainer, "build_step_runner", lambda *arguments: GivesUp(build(*arguments)))
    watches = Watches()
    found = run_recipe("tiny", {**TINY, "metrics.log_freq": 1}, weights=True, observers=[watches])
    assert (found.losses, found.grad_norms, found.targets) == (expected.losses, expected.grad_norms, expected.targets)
    assert all(torch.equal(weight, expected.final[name]) for name, weight in found.final.items())
    second = ["start 2", "cancelled 2", "start 2", "end 2"]
    third = ["start 3", "cancelled 3", "start 3", "cancelled 3", "start 3", "end 3"]
    assert watches.events == ["start 1", "end 1", *second, *third, "start 4", "end 4"]
