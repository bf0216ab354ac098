"""A model whose plugin states another number of floating-point operations than its matmuls take is refused, or noted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from harness import small_gpt
from harness.model_trials import ONE, require
from harness.odd_gpts import mixed
from titan_core.api import Mixer, UserError
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.stand_in import StandInMode
from titan_testing.jobs import make_job


def times(factor: float, build: Callable[[], object] = small_gpt.SmallGPT, layout: Any = small_gpt.LAYOUT) -> AssembledJob:
    job = small_gpt.job_of(small_gpt.definition(build, layout), ONE, 1)
    stated = job.model.flops_per_token
    return replace(job, model=replace(job.model, flops_per_token=lambda seq_len: factor * stated(seq_len)))


@pytest.mark.parametrize(("factor", "shown"), [(10.0, "10"), (2.1, "2.1"), (0.45, "2.22"), (0.0, "inf")])
def test_a_wrong_number_is_refused(factor: float, shown: str) -> None:
    with pytest.raises(UserError, match=rf"flops_per_token\(16\) is .*: a factor of {shown}; count 6 per element") as raised:
        require(times(factor))
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize(("factor", "noted"), [(1.0, False), (1.08, False), (0.93, False), (1.2, True), (0.8, True)])
def test_a_smaller_difference_is_noted(factor: float, noted: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        require(times(factor))
    assert ("MFU, plans and estimates depend on it" in caplog.text) == noted


def test_attention_counts_at_the_length_of_training() -> None:
    """The trial has 16 positions; that of 65,536 would be seen nowhere else."""
    job = make_job("tiny", {"job.device": "cpu", "training.seq_len": 65_536, "model.args": "{max_seq_len = 65536}"})
    require(job)
    stated = job.model.flops_per_token
    wrong = replace(job.model, flops_per_token=lambda seq_len: stated(16))
    with pytest.raises(UserError, match=r"flops_per_token\(65536\)"):
        require(replace(job, model=wrong))


class Quadratic(nn.Module):
    """A mixer whose chunks cost what a plugin's formula does not say."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.tril(x.repeat(1, 1, 64) @ x.repeat(1, 1, 64).mT)
        return (scores @ x).tanh()


def test_mixers_of_their_own_may_cost_what_they_do() -> None:
    layout = replace(small_gpt.LAYOUT, mixers={**small_gpt.LAYOUT.mixers, "blocks.1.extra": Mixer(kind="quadratic")})
    require(times(1.0, mixed(Quadratic), layout))
    with pytest.raises(UserError, match=r"is .*floating-point operations per token"):
        require(times(10.0, mixed(Quadratic), layout))


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.rand(3, 5) @ torch.rand(5, 7),
        lambda: torch.baddbmm(torch.rand(2, 3, 7), torch.rand(2, 3, 5), torch.rand(2, 5, 7)),
        lambda: nn.functional.linear(torch.rand(2, 3, 5), torch.rand(7, 5), torch.rand(7)),
        lambda: torch.einsum("bsi,ihf->bshf", torch.rand(2, 3, 4), torch.rand(4, 5, 6)),
        lambda: nn.functional.conv1d(torch.rand(2, 4, 9), torch.rand(8, 2, 3), groups=2),
        lambda: torch.rand(3, 4) * 2.0,
    ],
)
def test_operators_are_counted_as_torch_counts_them(compute: Callable[[], Tensor]) -> None:
    mode = StandInMode(nn.Identity())
    with torch.no_grad(), mode:
        compute()
    with FlopCounterMode(display=False) as expected, torch.no_grad():
        compute()
    assert mode.flops == expected.get_total_flops()


def test_attention_counts_its_two_products_whole() -> None:
    """torch counts it so too, on CPUs from 2.12 on."""
    query = torch.rand(2, 4, 8, 6)
    mode = StandInMode(nn.Identity())
    with torch.no_grad(), mode:
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert mode.flops == 2 * (2 * (2 * 4) * 8 * 8 * 6)


def test_a_product_with_a_large_matrix_counts_whole() -> None:
    layer = nn.Linear(2048, 1024, bias=False)
    mode = StandInMode(layer)
    with torch.no_grad(), mode:
        layer(torch.rand(3, 2048))
    assert mode.flops == 2.0 * 3 * 2048 * 1024
