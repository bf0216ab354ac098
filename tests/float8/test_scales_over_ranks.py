"""A float8 layer that two ranks share computes the numbers of the whole layer."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchao.float8 import convert_to_float8_training

from titan_core.api import Column, ModelLayout, ModelPart, Row
from titan_core.loop.world import join_world
from titan_core.model.next_token import NextToken
from titan_float8.config import Float8Section
from titan_float8.float8 import linear_config
from titan_float8.tensor_parallel import scale_over_ranks
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import make_job

SIZE = 32
LAYOUT = ModelLayout(
    num_blocks=1,
    dim=SIZE,
    vocab_size=SIZE,
    max_seq_len=SIZE,
    embedding=("embed",),
    blocks="blocks",
    head=("head",),
    rules={"blocks.0.weight": Column(), "blocks.1.weight": Row()},
)


def layer(weight: Tensor) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    config = linear_config(Float8Section(emulate=True), gather=False)
    return convert_to_float8_training(nn.Sequential(linear), config=config)[0]


def passed(module: nn.Module, hidden: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the gradient of the input, and that of the weight."""
    hidden = hidden.clone().requires_grad_()
    weight: Any = module.weight
    weight.grad = None
    output = module(hidden)
    output.backward(gradient)
    assert hidden.grad is not None and weight.grad is not None
    return output.detach(), hidden.grad, weight.grad


def differences(folder: str) -> dict[str, float]:
    """Return the largest differences of what this rank's halves of two layers compute, by what they are of."""
    os.chdir(folder)
    with join_world(make_job("tiny", {"job.device": "cpu"}, 2)):
        mesh = init_device_mesh("cpu", (2,))
        own = slice(mesh.get_local_rank() * SIZE // 2, (mesh.get_local_rank() + 1) * SIZE // 2)
        generator = torch.Generator().manual_seed(0)
        # Magnitudes differ between features, so that each half has another scale.
        spread = torch.logspace(0, 1, SIZE)
        weight, hidden, gradient = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(3))
        weight, hidden, gradient = weight * spread[:, None] * spread, hidden * spread, gradient * spread
        output, to_hidden, to_weight = passed(layer(weight), hidden, gradient)
        blocks = nn.ModuleList([layer(weight[own]), layer(weight[:, own])])
        module = nn.ModuleDict({"blocks": blocks, "head": layer(weight[own])})
        scale_over_ranks(ModelPart(module, LAYOUT, NextToken()), ["blocks.0", "blocks.1", "head"], mesh)
        by_output, by_input = module.get_submodule("blocks.0"), module.get_submodule("blocks.1")
        first = passed(by_output, hidden, gradient[:, own])
        second = passed(by_input, hidden[:, own], gradient)
        of_head = passed(module.get_submodule("head"), hidden, gradient[:, own])
        by_output.bias = nn.Parameter(spread[own].clone())
        biased = passed(by_output, hidden, gradient[:, own])
        # The sums over ranks are in another order.
        sums = [torch.empty_like(total) for total in (to_hidden, output)]
        for total, addend in zip(sums, (first[1], second[0]), strict=True):
            total.copy_(addend)
            torch.distributed.all_reduce(total)
        pairs = {
            "columns: output": (first[0], output[:, own]),
            "columns: weight": (first[2], to_weight[own]),
            "columns: output with a bias": (biased[0], output[:, own] + spread[own]),
            "head: output": (of_head[0], output[:, own]),
            "head: weight": (of_head[2], to_weight[own]),
            "rows: input": (second[1], to_hidden[:, own]),
            "rows: weight": (second[2], to_weight[:, own]),
            "columns: input, summed": (sums[0], to_hidden),
            "rows: output, summed": (sums[1], output),
        }
        return {name: ((found - whole).abs().max() / whole.abs().max()).item() for name, (found, whole) in pairs.items()}


def test_halves_of_a_layer_compute_the_numbers_of_the_whole(gloo: GlooPool, tmp_path: Any) -> None:
    for found in gloo.run(2, differences, str(tmp_path)):
        for name, difference in found.items():
            assert difference == pytest.approx(0.0, abs=1e-6), name
