"""Averages of weights: what they take, and what they leave as it was."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.tiny_part import CPU, tiny
from titan_core.api import ModelPart, StepReport, ValidationReport
from titan_optim import averages_on_host
from titan_optim.averages import AveragedWeights
from titan_optim.config import AveragesSection

ZERO = torch.zeros(())
REPORT = StepReport(1, ZERO, ZERO[None], ZERO, 1e-3, num_targets=1, epoch=0, data_seconds=0.0)
VALIDATION = ValidationReport(4, 1.0, 1, 1, 0.1)
WEIGHT = "tok_embeddings.weight"
JOB = SimpleNamespace(section=lambda kind: kind())
"""A job whose sections have their defaults."""


@pytest.fixture
def part() -> ModelPart:
    """A part with an embedding in bf16, a frozen norm, and buffers: one of floats, a counter, and one that is not saved."""
    found = tiny(n_layers=1)
    found.module.register_buffer("bias", torch.tensor([1.0]))
    found.module.register_buffer("counter", torch.tensor([1]))
    found.module.register_buffer("table", torch.tensor([1.0]), persistent=False)
    embedding = found.module.get_submodule("tok_embeddings")
    embedding.weight = nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16))
    found.module.get_parameter("norm.weight").requires_grad_(False)
    return found


def averages_of(part: ModelPart, **settings: Any) -> AveragedWeights:
    job = SimpleNamespace(section=lambda kind: kind())
    context: Any = SimpleNamespace(section=AveragesSection(kind="exponential", decay=0.75, **settings), device=CPU, job=job)
    return AveragedWeights([part], context)


def step(averages: AveragedWeights, part: ModelPart, number: int, skipped: bool | Tensor = False) -> None:
    """Set the embedding and the buffer to the number of the step, and end the step."""
    part.module.get_parameter(WEIGHT).data.fill_(number)
    part.module.get_buffer("bias").fill_(number)
    averages.titan_step_end(replace(REPORT, step=number, skipped=skipped))


def values(averages: AveragedWeights) -> Iterator[float]:
    """Yield the average of the embedding and that of the buffer."""
    tensors = averages.titan_state_tensors()
    yield from (tensors[f"averaged_weights.{name}"].flatten()[0].item() for name in (WEIGHT, "bias"))


def test_trained_parameters_and_saved_floats_are_averaged(part: ModelPart) -> None:
    tensors = averages_of(part).titan_state_tensors()
    names = {name.removeprefix("averaged_weights.") for name in tensors}
    trained = {name for name, parameter in part.module.named_parameters() if parameter.requires_grad}
    assert "norm.weight" not in names
    assert names == {*trained, "bias", "states"}
    assert tensors[f"averaged_weights.{WEIGHT}"].dtype == torch.float32


def test_an_average_begins_with_the_first_state_and_takes_every_second(part: ModelPart) -> None:
    averages = averages_of(part, start_step=2, freq=2)
    seen = []
    for number in range(1, 7):
        step(averages, part, number)
        seen.append(next(values(averages)))
    assert seen == [0.0, 2.0, 2.0, 2.5, 2.5, 3.375]
    assert [*values(averages)] == [3.375, 3.375]


def test_a_mean_weighs_all_states_alike(part: ModelPart) -> None:
    context: Any = SimpleNamespace(section=AveragesSection(kind="mean"), device=CPU, job=JOB)
    averages = AveragedWeights([part], context)
    for number in range(1, 6):
        step(averages, part, number)
    assert [*values(averages)] == pytest.approx([3.0, 3.0], rel=1e-6)


@pytest.mark.parametrize("flag", [True, torch.tensor(True)], ids=["host", "device"])
def test_a_skipped_step_is_left_out(part: ModelPart, flag: bool | Tensor) -> None:
    averages = averages_of(part)
    for number, skipped in enumerate([flag, torch.tensor(False), flag, False], 1):
        step(averages, part, number, skipped)
    assert [*values(averages)] == [2.5, 2.5]
    assert averages.titan_state_tensors()["averaged_weights.states"].item() == 2


class Validations:
    """Records what the model has when it is validated, and what is recomputed from it."""

    def __init__(self, part: ModelPart, averages: AveragedWeights) -> None:
        self.names: list[str] = []
        self.seen: list[float] = []
        self.recomputed: list[float] = []
        self._weight = part.module.get_parameter(WEIGHT)
        part.weights_changed = (lambda: self.recomputed.append(self._weight[0, 0].item()),)
        run: Any = SimpleNamespace(validate=self)
        averages.titan_train_start(run)

    def __call__(self, name: str) -> None:
        self.names.append(name)
        self.seen.append(self._weight[0, 0].item())


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_averages_are_in_the_model_while_they_are_validated(part: ModelPart, offload: bool) -> None:
    averages = averages_of(part, enable_cpu_offload=offload)
    validations = Validations(part, averages)
    averages.titan_validation_end(VALIDATION)
    assert validations.names == []  # nothing is averaged yet
    step(averages, part, 1)
    step(averages, part, 5)
    averages.titan_validation_end(VALIDATION)
    averages.titan_validation_end(replace(VALIDATION, name="averaged"))  # its own
    assert (validations.names, validations.seen, validations.recomputed) == (["averaged"], [2.0], [2.0, 5.0])
    assert part.module.get_parameter(WEIGHT)[0, 0].item() == part.module.get_buffer("bias").item() == 5.0
    assert [*values(averages)] == [2.0, 2.0]


def test_validation_of_averages_can_be_switched_off(part: ModelPart) -> None:
    averages = averages_of(part, validate_averages=False)
    validations = Validations(part, averages)
    step(averages, part, 1)
    averages.titan_validation_end(VALIDATION)
    assert validations.names == []


@pytest.mark.parametrize("kind", ["exponential", "mean"])
def test_averages_on_the_host_have_the_same_values(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, of which the last is smaller; also of a weight that is not contiguous, and without elements."""
    monkeypatch.setattr(averages_on_host, "ELEMENTS", 16)
    part = tiny(n_layers=1)
    generator = torch.Generator().manual_seed(1)
    wide = nn.Parameter(torch.zeros(4, 9).t())
    assert not wide.is_contiguous()
    part.module.get_submodule("tok_embeddings").weight = wide
    part.module.register_buffer("bias", torch.ones(3))
    part.module.register_buffer("none", torch.ones(0))
    settings = {"kind": kind} | ({"decay": 0.75} if kind == "exponential" else {})
    both = []
    for offload in (False, True):
        context: Any = SimpleNamespace(
            section=AveragesSection(**settings, enable_cpu_offload=offload),
            device=CPU,
            job=JOB,  # type: ignore[arg-type]
        )
        both.append(AveragedWeights([part], context))
    for number in range(1, 6):
        for parameter in part.module.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        part.module.get_buffer("bias").fill_(number / 3)
        for one in both:
            one.titan_step_end(replace(REPORT, step=number, skipped=torch.tensor(number == 3)))
            one.titan_before_update()
    device, host = (one.titan_state_tensors() for one in both)
    assert device.keys() == host.keys()
    assert all(torch.equal(device[name], host[name]) for name in device)
    assert device["averaged_weights.states"] == 4 and device[f"averaged_weights.{WEIGHT}"].any()


def test_a_buffer_may_change_while_averages_on_the_host_are_taken(part: ModelPart, monkeypatch: pytest.MonkeyPatch) -> None:
    averages = averages_of(part, enable_cpu_offload=True)
    taken: list[tuple[Tensor, Tensor]] = []
    assert averages._host is not None
    monkeypatch.setattr(averages._host, "take", lambda pairs, weight: taken.extend(pairs))
    step(averages, part, 1)
    part.module.get_buffer("bias").fill_(9.0)
    part.module.get_parameter(WEIGHT).data.fill_(7.0)
    values = {newest.flatten()[0].item() for _, newest in taken if newest.numel()}
    assert 9.0 not in values and 7.0 in values  # parameters are not copied: the next update waits


class Log:
    """Stands in for ``torch.cuda``, its streams and its events: writes down who waits for whom."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self._name, self._lines = name, lines

    def Stream(self, device: torch.device) -> Log:
        return Log("averages", self._lines)

    def current_stream(self, device: torch.device) -> Log:
        return Log("training", self._lines)

    def stream(self, stream: Log) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_stream(self, other: Log) -> None:
        self._lines.append(f"{self._name} waits for {other._name}")

    def wait_event(self, event: Log) -> None:
        self._lines.append(f"{self._name} waits for {event._name}")

    def record_event(self) -> Log:
        return Log("the averages", self._lines)

    def synchronize(self) -> None:
        self._lines.append(f"the host waits for {self._name}")


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(torch, "cuda", Log("cuda", lines))
    host = averages_on_host.HostAverages(torch.device("cuda", 0))
    host.before_change()
    host.finish()
    assert lines == []  # nothing to wait for yet
    monkeypatch.setattr(host, "_take", lambda pairs, weight: lines.append("taken"))
    host.take([(ZERO, ZERO)], ZERO)
    host.before_change()
    host.finish()
    assert lines == [
        "averages waits for training", "taken", "training waits for the averages", "the host waits for the averages"
    ]  # fmt: skip


def test_the_memory_of_what_is_averaged_is_kept_until_it_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator would give it to the training stream again, while the other one reads."""
    host = averages_on_host.HostAverages(CPU)
    newest = torch.ones(3)
    gone = weakref.ref(newest)
    host.take([(torch.zeros(3), newest)], torch.tensor(0.5))
    del newest
    assert gone() is not None
    host.before_change()
    assert gone() is None
