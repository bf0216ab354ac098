"""Initial values that the library computes in several operations: recorded, and computed for each element by Titan."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.hf_families import config_of
from titan_core.api import Elements
from titan_models_hf.config import HFArgs
from titan_models_hf.initial import initial_values
from titan_models_hf.library import plain_model
from titan_models_hf.programs import ProgramRecorder, run


def elements(count: int, numbers: Tensor) -> Elements:
    """Return all elements of a vector, whose draws are ``numbers``, then their halves, and so on."""
    draws = iter([numbers / 2**time for time in range(8)])
    return Elements((count,), (torch.arange(count),), lambda: next(draws))


def values_of(family: str, ending: str, numbers: Tensor) -> Tensor:
    architecture, config = config_of(family)
    args = HFArgs(architecture=architecture, config=config)
    found = initial_values(args, plain_model(args))
    name, program = next(value for name, value in found.items() if name.endswith(ending))
    assert name == "computed"
    return run(elements(len(numbers), numbers), str(program[0]))


NUMBERS = torch.tensor([0.1, 0.4, 0.7, 0.9])


def test_logarithms_of_a_draw() -> None:
    expected = (NUMBERS * (16 - 0.01) + 0.01).log()
    assert torch.allclose(values_of("qwen3_next", "A_log", NUMBERS), expected)


def test_numbers_by_index() -> None:
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0]).log()
    assert torch.allclose(values_of("falcon_h1", "A_log", NUMBERS), expected)


def program(compute: Any) -> str | None:
    recorder = ProgramRecorder()
    with recorder:
        result = compute()
    return recorder.program(result)


def test_a_draw_that_is_used_twice_is_one_draw() -> None:
    """Mamba's time steps, through an inverse softplus."""

    def compute() -> Tensor:
        dt = torch.exp(torch.rand(4, device="meta") * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3))
        dt = torch.clamp(dt, min=5e-3)
        return dt + torch.log(-torch.expm1(-dt))

    text = program(compute)
    assert text is not None
    assert sum(step[0] == "uniform" for step in json.loads(text)) == 1
    found = run(elements(4, NUMBERS), text)
    dt = (NUMBERS * math.log(100) + math.log(1e-3)).exp().clamp(min=5e-3)
    assert torch.allclose(torch.nn.functional.softplus(found), dt, rtol=1e-4)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_order_of_operands_is_kept(swapped: bool) -> None:
    text = program(lambda: 2.0 - torch.rand(4, device="meta") if swapped else torch.rand(4, device="meta") - 2.0)
    assert text is not None
    assert torch.allclose(run(elements(4, NUMBERS), text), 2.0 - NUMBERS if swapped else NUMBERS - 2.0)


def test_an_unknown_operation_has_no_program() -> None:
    assert program(lambda: torch.rand(4, device="meta").cumsum(0)) is None
    assert program(lambda: torch.rand(4, device="meta").log_().sin_()) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("view", [False, True])
def test_an_element_that_is_written_to_afterwards_is_not_forgotten(device: str, view: bool) -> None:
    def compute() -> Tensor:
        values = torch.ones(4, device=device) if device == "cpu" else torch.rand(4, device=device)
        first = values.log()  # both have been recorded
        (values.view(2, 2)[1] if view else values)[0] = 5.0
        return values.exp() if device == "meta" else first + values

    text = program(compute)
    if device == "meta":
        assert text is None
    else:
        assert text is not None
        expected = [1.0, 1.0, 5.0, 1.0] if view else [5.0, 1.0, 1.0, 1.0]
        assert run(elements(4, NUMBERS), text).tolist() == expected


def test_random_numbers_that_nothing_records_must_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import initialization
    from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

    original = Qwen3PreTrainedModel._init_weights

    def drawn(self: Any, module: Any) -> None:
        original(self, module)
        if type(module).__name__ == "Qwen3RMSNorm":
            initialization.copy_(module.weight, torch.randn(len(module.weight), device="cpu"))

    monkeypatch.setattr(Qwen3PreTrainedModel, "_init_weights", drawn)
    architecture, config = config_of("qwen3")
    args = HFArgs(architecture=architecture, config=config)
    values = initial_values(args, plain_model(args))
    unknown = {name for name, value in values.items() if value[0] == "loaded"}
    assert unknown == {name for name in values if name.endswith("norm.weight")}
