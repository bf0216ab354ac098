"""A model whose logits depend on random draws is refused with all of its arguments that let it draw."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from harness import small_gpt
from harness.model_trials import ONE, require
from harness.odd_gpts import mixed
from titan_core.api import ModelDefinition, Ref, UserError
from titan_core.toolkit.random_state import draws


class Rates(BaseModel):
    model_config = {"extra": "forbid"}

    dropout: float = 0.0
    jitter: float = 0.0
    layer_drop: float = 0.0
    gumbel: bool = False
    scale: float = 1.0
    width: int = 8


class Random(nn.Module):
    """Multiplies by numbers that are close to 1, or rarely 0."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self.rates = rates
        self.dropout = nn.Dropout(rates.dropout)

    def forward(self, x: Tensor) -> Tensor:
        rates = self.rates
        x = self.dropout(x) * rates.scale
        if self.training and rates.jitter:
            x = x * torch.empty_like(x).uniform_(1.0 - rates.jitter, 1.0 + rates.jitter)
        if self.training and torch.rand([]) < rates.layer_drop:  # draws whatever the rate is
            return x * 0.0
        return x + nn.functional.gumbel_softmax(x, dim=-1) if rates.gumbel else x


def define(rates: Rates) -> ModelDefinition:
    return small_gpt.definition(mixed(partial(Random, rates)), small_gpt.LAYOUT)


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    "random",
    [
        {},
        {"dropout": 1e-6},
        {"jitter": 1e-6},
        {"layer_drop": 1e-6},
        {"dropout": 0.1, "jitter": 0.01, "layer_drop": 0.1, "gumbel": True},
    ],
    ids=lambda random: ", ".join(random) or "nothing",
)
def test_all_keys_are_named_in_one_message(random: dict[str, Any]) -> None:
    rates = Rates(**random)
    job = small_gpt.job_of(define(rates), ONE, 1)
    family = replace(job.family, define=Ref("core.test_randomness:define"))
    job = replace(job, family=family, model_args=rates)
    if not random:
        require(job)
        return
    with pytest.raises(UserError) as raised:
        require(job)
    (problem,) = raised.value.problems
    assert "'blocks.1.extra" in problem.why
    found = {key for key in Rates.model_fields if f"model.args.{key} = " in problem.fix}
    assert found == set(random), problem


ATEN = torch.ops.aten
X = torch.ones(2)
QKV = (torch.ones(1, 1, 2, 2),) * 3


@pytest.mark.parametrize(
    ("operator", "arguments", "keywords", "random"),
    [
        (ATEN.add.Tensor, (X, X), {}, False),
        (ATEN.rand.default, ([2],), {}, True),
        (ATEN.random_.default, (X,), {}, True),
        (ATEN.bernoulli_.float, (X,), {}, True),
        (ATEN.native_dropout.default, (X, 0.0, True), {}, False),
        (ATEN.native_dropout.default, (X, 0.1, False), {}, False),
        (ATEN.native_dropout.default, (X, 0.1, True), {}, True),
        (ATEN._scaled_dot_product_flash_attention_for_cpu.default, QKV, {}, False),
        (ATEN._scaled_dot_product_flash_attention_for_cpu.default, (*QKV, 0.0, True), {}, False),
        (ATEN._scaled_dot_product_flash_attention_for_cpu.default, QKV, {"dropout_p": 0.1}, True),
    ],
)
def test_which_calls_draw(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], random: bool) -> None:
    assert draws(operator, arguments, keywords) == random
