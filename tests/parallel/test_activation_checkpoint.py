"""Activation checkpointing saves memory, and recomputes no more than it must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single
from torch.utils._python_dispatch import TorchDispatchMode

from harness.objectives import first_step
from harness.transforms import transform
from titan_core.api import Batch, ModelPart, UserError
from titan_core.api.model.attention import flex_attend
from titan_core.api.model.attention_mask import block_mask
from titan_core.loop.world import join_world
from titan_core.model.build import build_parts
from titan_core.model.next_token import NextToken
from titan_parallel.activation_checkpoint import Selection, _contexts, saved_operators
from titan_parallel.split_backward_contexts import contexts
from titan_testing.jobs import make_job

TINY: dict[str, object] = {
    "model.args": "{dim = 64, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}",
    "training.local_batch_size": 2,
    "training.seq_len": 64,
    "job.device": "cpu",
}


SELECTIVE = {"activation_checkpoint.mode": "selective"}


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


def test_each_mode_recomputes_what_it_says(in_tmp: Path) -> None:
    """Selective recomputation keeps attention and half of the matmuls."""
    bytes_none, matmuls_none, attention_none = costs({})
    bytes_full, matmuls_full, attention_full = costs({"activation_checkpoint.mode": "full"})
    _, matmuls_selective, attention_selective = costs(SELECTIVE)
    by_block = {n: costs({**SELECTIVE, "activation_checkpoint.selective_ac_option": str(n)}) for n in (2, 3, 4)}
    bytes_half, matmuls_half, _ = by_block[2]
    assert (attention_none, attention_full, attention_selective) == (4, 8, 4)
    assert [attention for _, _, attention in by_block.values()] == [6, 6, 5]  # two blocks, the first and the fourth, one
    assert matmuls_none < matmuls_half < matmuls_full
    assert matmuls_none < matmuls_selective < matmuls_full
    assert bytes_full < bytes_half < bytes_none
    assert bytes_full < 0.3 * bytes_none


class CountCalls(TorchDispatchMode):
    """Counts the calls of an operator, whether it is a higher-order operator or not."""

    supports_higher_order_operators = True

    def __init__(self, operator: object) -> None:
        super().__init__()
        self.operator, self.calls = operator, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        self.calls += function is self.operator
        return function(*arguments, **(keywords or {}))


def silu_calls(overrides: dict[str, object], transforms: tuple[str, ...] = (), by_layout: str = "") -> int:
    """Return how often forward and backward of four blocks compute SiLU."""
    job = make_job("tiny", {**TINY, **overrides})
    job = replace(job, transforms=(*map(transform, transforms), *job.transforms))
    if by_layout:
        layout = replace(job.model.layout, saved_operators=(by_layout,))
        job = replace(job, model=replace(job.model, layout=layout))
    with join_world(job) as world:
        (part,) = build_parts(job, world.mesh, world.device)
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        with CountCalls(torch.ops.aten.silu.default) as count:
            part.forward_loss(first_step(Batch(tokens, tokens))).backward()
        return count.calls


def test_plugins_add_operators_to_keep_or_choose_a_policy_for_each_block(in_tmp: Path) -> None:
    assert silu_calls({}) == 4
    assert silu_calls(SELECTIVE) == 8
    assert silu_calls(SELECTIVE, ("saves_silu",)) == 4
    assert silu_calls(SELECTIVE, by_layout="aten::silu") == 4
    assert silu_calls(SELECTIVE, ("policies",)) == 4 + 2


def test_a_policy_of_anything_but_a_block_is_refused(in_tmp: Path) -> None:
    with pytest.raises(
        UserError, match=r"left a policy for 'tok_embeddings' in titan_parallel\.save_policies, which is not a"
    ):
        silu_calls(SELECTIVE, ("misplaced_policy",))


@pytest.mark.full
def test_blocks_with_other_policies_are_compiled_separately(in_tmp: Path) -> None:
    compiled = {**SELECTIVE, "compile.enable": "true", "compile.backend": "aot_eager"}
    assert silu_calls(compiled, ("policies",)) == 4 + 2


def both_passes(function: Callable[[], object], part: ModelPart) -> None:
    """Call ``function`` in the forward context of a schedule that splits backward, and twice in that of recomputation."""
    forward, again = contexts(Selection(saved_operators(part)).new_decision)
    with forward:
        first = function()
    for _ in range(2):
        with again:
            torch.testing.assert_close(function(), first, rtol=0, atol=0)


def tiny_part(*saved: Callable[..., object]) -> ModelPart:
    layout = make_job("tiny", TINY).model.layout
    return ModelPart(torch.nn.Linear(1, 1), layout, NextToken(), saved_operators=saved)


def test_added_operators_are_kept_for_schedules_that_split_backward(in_tmp: Path) -> None:
    value = torch.randn(3)
    with CountCalls(torch.ops.aten.silu.default) as count:
        both_passes(lambda: torch.nn.functional.silu(value), tiny_part(torch.ops.aten.silu.default))
    assert count.calls == 1


@pytest.mark.parametrize("name", ["aten::no_such_operator", "nowhere::scan", "silu"])
def test_an_unknown_operator_is_refused(in_tmp: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"saved_operators names '{name}', which is not an operator registered with torch"):
        silu_calls(SELECTIVE, by_layout=name)


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


def kept(operator: object, function: Callable[[], object], part: ModelPart) -> bool:
    """Whether recomputation uses the result of ``operator`` from the forward pass, in both kinds of contexts."""
    with CountCalls(operator) as count:
        both_passes(function, part)
    forward, again = _contexts(Selection(saved_operators(part)))
    with CountCalls(operator) as torch_count:
        with forward:
            function()
        with again:
            function()
    assert (count.calls, torch_count.calls) in ((1, 1), (3, 2))
    return count.calls == 1


def test_routing_is_not_recomputed(in_tmp: Path) -> None:
    scores = torch.randn(4, 8)
    assert kept(torch.ops.aten.topk.default, lambda: scores.topk(2), tiny_part())


def test_flex_attention_is_kept(in_tmp: Path) -> None:
    """In eager CUDA code it is compiled, which makes it one operator; here it runs uncompiled."""
    q, documents = torch.randn(1, 2, 128, 16), torch.arange(128)[None] // 50
    mask = block_mask(documents, torch.arange(128)[None])
    assert kept(torch.ops.higher_order.flex_attention, lambda: flex_attend(q, q, q, mask), tiny_part())


@pytest.mark.full
def test_compiled_regions_are_kept(in_tmp: Path) -> None:
    compiled = torch.compile(lambda value: value.sin().cos(), options={"wrap_inductor_compiled_regions": True})
    value = torch.randn(64)
    assert kept(torch.ops.higher_order.inductor_compiled_code, lambda: compiled(value), tiny_part())


def test_tokens_are_not_sent_to_experts_again(in_tmp: Path) -> None:
    rows, operator = torch.arange(4.0), torch.ops._c10d_functional.all_to_all_single.default
    with join_world(make_job("tiny", TINY)):
        assert kept(operator, lambda: all_to_all_single(rows, None, None, dist.group.WORLD) * 1, tiny_part())


def test_matmuls_of_all_precisions_are_counted_together() -> None:
    aten = torch.ops.aten
    decide = Selection(frozenset()).new_decision()
    operators = [aten.mm, aten._scaled_mm, aten.silu, aten._scaled_mm, aten._grouped_mm, aten._scaled_mm]
    assert [decide(operator.default)[1] for operator in operators] == [False, True, False, False, True, False]
