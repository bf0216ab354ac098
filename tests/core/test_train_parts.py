"""The small parts of the training loop, each by itself, against numbers worked out by hand."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from harness.objectives import OfTargets
from harness.one_of_many import CPU, OneOfMany
from titan_core.api import Batch, SharedRequest, StepInput, Vocabulary, World
from titan_core.api.config.sections import TrainingSection, ValidationSection
from titan_core.api.parallel.step import GradientAccumulation
from titan_core.api.training.batch import IGNORE
from titan_core.data.loader import StepData
from titan_core.loop.process_settings import prepare_numerics
from titan_core.loop.validation import Validation
from titan_core.model.next_token import NextToken
from titan_core.runlog import time_by_cause
from titan_core.runlog.time_by_cause import Stopwatch


def test_the_loss_is_a_sum_in_fp32_over_what_is_a_target() -> None:
    logits = torch.tensor([[[2.0, 0.0], [1.0, 1.0], [0.0, 5.0]]], dtype=torch.bfloat16)
    targets = torch.tensor([[0, 1, IGNORE]])
    loss = NextToken()(logits, Batch(targets, targets), Vocabulary())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-2)) + math.log(2), rel=1e-6)


class Line(nn.Module):
    """``weight * tokens`` for logits of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight * tokens


def test_microbatches_add_up_to_the_mean_over_the_global_batch() -> None:
    from titan_core.api import ModelPart

    module = Line()
    part = ModelPart(
        module,
        cast(Any, SimpleNamespace(inputs=(), masks_documents=False, mixers={})),
        OfTargets(lambda outputs, targets: outputs.sum()),
    )
    batches = [Batch(torch.tensor([[value]]), torch.zeros(1, 1)) for value in (1.0, 2.0, 5.0)]
    run = GradientAccumulation(part)
    share = run(StepInput(batches, 1, 0, target_weight=4.0))
    assert (share.item(), share.requires_grad) == (2.0 * 8.0 / 4, False)
    assert module.weight.grad is not None
    assert module.weight.grad.item() == 8.0 / 4
    assert run.evaluate(StepInput(batches, 1, 0)).item() == 16.0
    assert module.weight.grad.item() == 8.0 / 4


@pytest.fixture
def generators() -> Iterator[None]:
    """What a test sets of torch's global settings is undone."""
    python, cpu, precision = random.getstate(), torch.get_rng_state(), torch.get_float32_matmul_precision()
    yield
    random.setstate(python)
    torch.set_rng_state(cpu)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)


def drawn(seed: int, world: World) -> tuple[float, float]:
    prepare_numerics(TrainingSection(seed=seed), world)
    return random.random(), torch.rand(1).item()


@pytest.mark.usefixtures("generators")
def test_seeds_differ_by_seed_and_by_what_a_rank_sees() -> None:
    here = drawn(1, OneOfMany({"dp_shard": 2, "tp": 2}))
    assert drawn(1, OneOfMany({"dp_shard": 2, "tp": 2}, {"tp": 1})) == here
    others = [drawn(1, OneOfMany({"dp_shard": 2}, {"dp_shard": 1})), drawn(2, OneOfMany({})), drawn(0, OneOfMany({}))]
    for other in others:
        assert other[0] != here[0]
        assert other[1] != here[1]
    assert len(set(others)) == 3
    drawn(2**63 - 1, OneOfMany({}))  # the largest that the config allows


@pytest.mark.usefixtures("generators")
def test_numerics_are_set_as_the_config_says() -> None:
    prepare_numerics(TrainingSection(float32_matmul_precision="medium", deterministic=True), OneOfMany({}))
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    prepare_numerics(TrainingSection(), OneOfMany({}))
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_stopwatch_adds_up_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 25.0, 30.0, 30.5])
    monkeypatch.setattr(time_by_cause.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(CPU)
    for name in ("a", "b", "a"):
        with watch.measure(name):
            pass
    assert watch.take() == {"a": 7.0, "b": 1.0}
    with watch.measure("b", on_host=True):
        pass
    assert watch.take() == {"b": 0.5}
    assert watch.take() == {}


def test_validation_is_due_at_its_frequency_and_at_the_end_once() -> None:
    validation = Validation.__new__(Validation)
    validation._section, validation._measured = ValidationSection(freq=4), None
    assert [step for step in range(1, 13) if validation.is_due(step)] == [4, 8, 12]
    assert validation.is_due(5, last=True)
    validation._measured = 8
    assert not validation.is_due(8)
    assert not validation.is_due(8, last=True)


class Batches:
    """A loader of empty batches with one target each."""

    def __init__(self, number: int) -> None:
        self._left = [StepData([], 0, [1], 1.0)] * number

    def peek(self) -> StepData | None:
        return self._left[0] if self._left else None

    def next_step(self) -> StepData | None:
        return self._left.pop() if self._left else None


class LoggedWorld(OneOfMany):
    """Logs when an exchange begins and when its result is waited for."""

    def sum_later(self, tensor: Tensor, over_replica: bool = False) -> Callable[[], Tensor]:
        cast(Any, self).summed.append("exchange")
        return lambda: cast(Any, self).summed.append("wait") or tensor


@pytest.mark.parametrize(("steps", "present"), [(2, 5), (-1, 2)])
def test_validation_exchanges_counts_while_the_batch_before_is_computed(steps: int, present: int) -> None:
    """All that is begun is waited for, whatever ends the validation."""
    validation, world = Validation.__new__(Validation), LoggedWorld({"dp_shard": 2})
    events = cast(Any, world).summed

    def evaluate(inputs: StepInput) -> Tensor:
        events.append("evaluate")
        return torch.tensor(0.5)

    validation._world, validation._run = world, cast(Any, SimpleNamespace(evaluate=evaluate))
    validation._section, validation._stop = ValidationSection(steps=steps), SharedRequest()
    validation._job = cast(Any, SimpleNamespace(config=SimpleNamespace(section=lambda section: TrainingSection())))
    measured = validation._sum(cast(Any, Batches(present)), 1)
    assert measured is not None and measured[:4] == (1.0, 2.0, 2, 2)
    of_the_end = ["exchange", "evaluate", "wait"] if steps < 0 else ["evaluate"]
    assert events == ["exchange", "wait", "exchange", "evaluate", "wait", *of_the_end]
