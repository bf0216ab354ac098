"""Samples of what the model writes during a run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_core.api import Checkpoint, Ref, Run, RunEnd, UserError, hookimpl
from titan_core.api.observe.events import Sample
from titan_inference.plugin import titan_next_commands
from titan_inference.sample import obstacle_to_sampling
from titan_testing.jobs import TINY, make_job, run_recipe

SAMPLED: dict[str, object] = {**TINY, "sample.enable": "true", "sample.max_new_tokens": 5, "sample.temperature": 0.0}


class Samples:
    """Collects the samples of a run."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    @hookimpl
    def titan_sample(self, sample: Sample) -> None:
        self.samples.append(sample)


def sampled(changes: dict[str, object]) -> list[Sample]:
    observer = Samples()
    run_recipe("tiny", {**SAMPLED, **changes}, observers=[observer])
    return observer.samples


def test_a_run_ends_with_a_sample_for_each_prompt(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = sampled({"sample.prompts": '["def ", ""]'})
    assert (first.step, first.prompt, second.prompt) == (4, "def ", "")
    assert 1 <= len(first.text) <= 5
    printed = capsys.readouterr().out
    assert printed.index("sample after step 4, from 'def ':") < printed.index("done: 4 steps")
    logged = [json.loads(line) for line in Path("outputs/tiny/events.jsonl").read_text().splitlines()]
    events = [event for event in logged if event["event"] != "spent"]
    assert [event["event"] for event in events] == ["start", "sample", "sample", "end"]
    assert (events[1]["prompt"], events[1]["text"]) == ("def ", first.text)


def test_samples_along_the_way_come_after_their_step(in_tmp: Path) -> None:
    assert [sample.step for sample in sampled({"sample.freq": 2, "training.steps": 5})] == [2, 4, 5]
    assert [sample.step for sample in sampled({"sample.freq": 4})] == [4]


def test_a_sample_is_reproducible_and_its_seed_counts(in_tmp: Path) -> None:
    def text(seed: int) -> str:
        (sample,) = sampled({"sample.temperature": 1.0, "sample.seed": seed, "sample.max_new_tokens": 20})
        return sample.text

    assert text(1) == text(1) != text(2)


def test_prompt_and_continuation_end_at_the_training_length(in_tmp: Path) -> None:
    (sample,) = sampled({"sample.prompts": f'["{"a" * 28}"]', "sample.max_new_tokens": 50})
    assert len(sample.text) <= 3  # 1 + 28 + 3 tokens of bytes


@pytest.mark.parametrize(
    ("prompts", "message"), [(f'["{"a" * 40}"]', "has 41 tokens, and training.seq_len = 32"), ("[]", "at least 1")]
)
def test_prompts_that_cannot_be_continued_are_refused_before_the_run(in_tmp: Path, prompts: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_recipe("tiny", {**SAMPLED, "sample.prompts": prompts})
    assert not Path("outputs").exists()


class Looks:
    """Evaluates before each step, slowly."""

    SECONDS = 0.2

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        self.run = run

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        module = self.run.parts[0].module
        parameter = next(module.parameters())
        parameter.grad = gradient = torch.ones_like(parameter)
        with self.run.evaluation():
            self.seen.append((module.training, torch.is_grad_enabled()))
            parameter.grad = None
            time.sleep(self.SECONDS)
        assert module.training and torch.is_grad_enabled() and parameter.grad is gradient
        parameter.grad = None


def test_an_evaluation_leaves_the_state_and_the_clock_of_training_alone(in_tmp: Path) -> None:
    looks = Looks()
    run_recipe("tiny", {**TINY, "metrics.log_freq": 1}, observers=[looks])
    assert looks.seen == [(False, False)] * 4
    lines = [json.loads(line) for line in Path("outputs/tiny/metrics.jsonl").read_text().splitlines()]
    assert min(line["step_seconds"] for line in lines) < looks.SECONDS


def test_a_run_that_must_leave_or_failed_takes_no_sample(in_tmp: Path) -> None:
    class Fails:
        @hookimpl
        def titan_step_end(self) -> None:
            raise RuntimeError("broken")

    observer = Samples()
    with pytest.raises(RuntimeError, match="broken"):
        run_recipe("tiny", SAMPLED, observers=[observer, Fails()])
    assert observer.samples == []


def test_the_next_command_continues_a_prompt_from_the_saved_weights(in_tmp: Path) -> None:
    job = make_job("tiny", {"sample.prompts": '["", "say \'hi\'"]'})
    store = Checkpoint(name="mine", summary="mine", active=lambda _: True, build=Ref("a:b"))

    def commands(checkpoint: str | None, find_model: Ref[Any] | None) -> list[Any]:
        saved = replace(job, checkpoint=replace(store, find_model=find_model))
        return titan_next_commands(saved, RunEnd(4, True, "", checkpoint=checkpoint))

    found = commands("run/step-4", Ref("a:c"))
    assert [one.arguments for one in found] == [("generate", "run/step-4", "--prompt", "say 'hi'")]
    assert commands(None, Ref("a:c")) == []
    assert commands("run/step-4", None) == []  # a store whose weights nothing else can read


def test_a_model_with_further_inputs_is_not_sampled() -> None:
    facts = make_job("tiny", TINY)
    assert obstacle_to_sampling(facts) is None
    layout = replace(facts.model.layout, inputs=("prefix",))
    found = obstacle_to_sampling(replace(facts, model=replace(facts.model, layout=layout)))
    assert found == "the model takes more than tokens (prefix)"
