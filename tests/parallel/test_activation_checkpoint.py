"""Activation checkpointing saves memory, and recomputes no more than it must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.jobs import make_job
from harness.objectives import first_step
from harness.transforms import transform
from titan_core.api.batch import Batch
from titan_core.api.errors import UserError
from titan_core.api.model_part import ModelPart
from titan_core.model.build import build_parts
from titan_core.model.next_token import NextToken
from titan_core.train.world import join_world
from titan_parallel.activation_checkpoint import _selection
from titan_parallel.split_backward_contexts import contexts

TINY: dict[str, object] = {
    "model.args": "{dim = 64, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}",
    "training.local_batch_size": 2,
    "training.seq_len": 64,
    "job.device": "cpu",
}


class CountMatmuls(TorchDispatchMode):
    """Counts matmuls and attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls = 0
        self.attention = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        self.matmuls += function is torch.ops.aten.mm.default
        self.attention += function is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return function(*arguments, **(keywords or {}))


def costs(overrides: dict[str, object]) -> tuple[int, int, int]:
    """Return (bytes saved for backward, matmuls, attention calls) of one forward and backward pass."""
    job = make_job("tiny", {**TINY, **overrides})
    with join_world(job) as world:
        (part,) = build_parts(job, world.mesh, world.device)
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with CountMatmuls() as count:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = part.forward_loss(first_step(Batch(tokens, tokens)))
            loss.backward()
        return sum(kept.values()), count.matmuls, count.attention


def test_full_recomputes_every_block_and_two_every_second_block(in_tmp: Path) -> None:
    bytes_none, matmuls_none, attention_none = costs({})
    bytes_full, matmuls_full, attention_full = costs({"activation_checkpoint.mode": "full"})
    half = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"}
    bytes_half, matmuls_half, attention_half = costs(half)
    assert (attention_none, attention_half, attention_full) == (4, 6, 8)
    assert matmuls_none < matmuls_half < matmuls_full
    assert bytes_full < bytes_half < bytes_none
    assert bytes_full < 0.3 * bytes_none


def test_selective_keeps_attention_and_half_of_the_matmuls(in_tmp: Path) -> None:
    _, matmuls_none, attention_none = costs({})
    _, matmuls_full, _ = costs({"activation_checkpoint.mode": "full"})
    _, matmuls, attention = costs({"activation_checkpoint.mode": "selective"})
    assert attention == attention_none
    assert matmuls_none < matmuls < matmuls_full


class CountSilu(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        self.calls += function is torch.ops.aten.silu.default
        return function(*arguments, **(keywords or {}))


def silu_calls(mode: str, by_transform: bool = False, by_layout: str = "") -> int:
    """Return how often forward and backward of four blocks compute SiLU."""
    job = make_job("tiny", {**TINY, "activation_checkpoint.mode": mode})
    if by_transform:
        job = replace(job, transforms=(transform("saves_silu"), *job.transforms))
    if by_layout:
        layout = replace(job.facts.model.layout, saved_operators=(by_layout,))
        job = replace(job, facts=replace(job.facts, model=replace(job.facts.model, layout=layout)))
    with join_world(job) as world:
        (part,) = build_parts(job, world.mesh, world.device)
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        with CountSilu() as count:
            part.forward_loss(first_step(Batch(tokens, tokens))).backward()
        return count.calls


def test_plugins_add_operators_to_keep(in_tmp: Path) -> None:
    assert silu_calls("none") == 4
    assert silu_calls("selective") == 8
    assert silu_calls("selective", by_transform=True) == 4
    assert silu_calls("selective", by_layout="aten::silu") == 4


def test_added_operators_are_kept_for_schedules_that_split_backward(in_tmp: Path) -> None:
    job = make_job("tiny", TINY)
    part = ModelPart(
        torch.nn.Linear(1, 1), job.facts.model.layout, NextToken(), saved_operators=(torch.ops.aten.silu.default,)
    )
    selection = _selection(part)
    forward, again = contexts(selection.group_of, selection.keeps)
    value = torch.randn(3)
    with CountSilu() as count:
        with forward:
            first = torch.nn.functional.silu(value)
        for _ in range(2):
            with again:
                assert torch.equal(torch.nn.functional.silu(value), first)
    assert count.calls == 1


@pytest.mark.parametrize("name", ["aten::no_such_operator", "nowhere::scan", "silu"])
def test_an_unknown_operator_is_refused(in_tmp: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"saved_operators names '{name}', which is not an operator registered with torch"):
        silu_calls("selective", by_layout=name)


def test_a_bad_selective_option_is_refused() -> None:
    with pytest.raises(UserError, match=r'selective_ac_option = "ops": must be "op" or a whole number'):
        make_job("tiny", {"activation_checkpoint.selective_ac_option": "ops"})


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_of_several_microbatches_are_exact(in_tmp: Path, mode: str) -> None:
    def gradients(overrides: dict[str, object]) -> list[torch.Tensor]:
        job = make_job("tiny", {**TINY, **overrides})
        with join_world(job) as world:
            (part,) = build_parts(job, world.mesh, world.device)
            for number in range(3):
                tokens = torch.arange(128).view(2, 64) + number
                part.forward_loss(first_step(Batch(tokens, tokens))).backward()
            return [parameter.grad for parameter in part.module.parameters() if parameter.grad is not None]

    for mine, exact in zip(gradients({"activation_checkpoint.mode": mode}), gradients({}), strict=True):
        torch.testing.assert_close(mine, exact)
