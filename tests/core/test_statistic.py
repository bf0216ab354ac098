"""What modules count is counted once in each microbatch of a step, with any recomputation, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.small_gpt import VOCAB, SmallGPT, choices, small
from titan_core.api import Batch, ModelPart, StepInput, UserError, add_statistic
from titan_core.api.parallel.microbatch import AuxiliaryLosses, Microbatch, StepCounts, current_microbatch, microbatch_scope
from titan_core.api.parallel.step import GradientAccumulation, shape_inference
from titan_core.loop.losses import StatisticSums
from titan_core.model.loss_head import attach
from titan_core.model.next_token import NextToken
from titan_core.model.preserved import repeat_backward, repeat_forward

COUNTED = small(blocks=4, counts=True)
SHAPES = COUNTED.layout.statistics
CPU = torch.device("cpu")
TOKENS = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))


def collector(shapes: dict[str, tuple[int, ...]] = SHAPES, ranks: int = 1, first: bool = True) -> StepCounts:
    return StepCounts(shapes, CPU, ranks, first)


def counting_part(recompute: bool = False) -> ModelPart:
    torch.manual_seed(0)
    part = ModelPart(COUNTED.build(), COUNTED.layout, NextToken())
    attach(part, 0)
    if recompute:
        for block in part.module.get_submodule("blocks").children():
            block.forward = partial(recomputed, block.forward)
    return part


def recomputed(forward: Any, *arguments: Any) -> Tensor:
    """Recompute ``forward`` within the microbatch, as activation checkpointing does."""
    contexts = nullcontext(), microbatch_scope(current_microbatch())
    result: Tensor = checkpoint(forward, *arguments, use_reentrant=False, context_fn=lambda: contexts)
    return result


def expected(model: nn.Module, tokens: Tensor) -> dict[str, list[Any]]:
    """Count by hooks in a plain forward pass."""
    found: dict[str, list[Tensor]] = {name: [] for name in SHAPES}

    def hook(name: str, count: Callable[[Tensor], Tensor], of_input: bool = False) -> Callable[..., None]:
        return lambda module, inputs, output: found[name].append(count(inputs[0] if of_input else output))

    for block in model.get_submodule("blocks").children():
        block.register_forward_hook(hook("outside", choices))
        block.get_submodule("mlp").register_forward_hook(hook("inside", choices, of_input=True))
        block.get_submodule("mlp.up").register_forward_hook(hook("features", lambda hidden: (hidden > 0).sum()))
    model(tokens)
    return {name: torch.stack(values).tolist() for name, values in found.items()}


def found(statistics: StepCounts) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in statistics.values.items()}


def reference() -> dict[str, list[Any]]:
    torch.manual_seed(0)
    return expected(SmallGPT(blocks=4), TOKENS)


@pytest.mark.parametrize("local", [4, 1])
@pytest.mark.parametrize("recompute", [False, True])
def test_each_microbatch_counts_once(local: int, recompute: bool) -> None:
    statistics = collector()
    inputs = StepInput(Batch(TOKENS, TOKENS).split(local), 1, 0, 64.0, statistics=statistics)
    GradientAccumulation(counting_part(recompute))(inputs)
    assert found(statistics) == reference()
    assert sum(statistics.values["outside"][2].tolist()) == TOKENS.numel()


def test_two_backward_passes_of_one_microbatch_count_once() -> None:
    """Schedules that compute the gradients of inputs before those of weights pass a module twice."""
    statistics = collector()
    part = counting_part()
    (microbatch,) = StepInput([Batch(TOKENS, TOKENS)], 1, 0, statistics=statistics).microbatches()
    loss = part.forward_loss(microbatch)
    loss.backward(retain_graph=True)
    loss.backward()
    assert found(statistics) == reference()


def test_nothing_else_counts() -> None:
    statistics, part = collector(), counting_part()
    run = GradientAccumulation(part)
    inputs = StepInput([Batch(TOKENS, TOKENS)], 1, 0, 64.0, AuxiliaryLosses(1.0), statistics=statistics)
    run.evaluate(inputs)
    repeat_forward(run, inputs, [part])
    with repeat_backward(run, inputs, [part]):
        pass
    hidden, values = torch.ones(4, 16, 2, requires_grad=True), torch.ones(3, dtype=torch.int64)
    assert add_statistic(hidden, "inside", values, index=0) is hidden  # outside a step
    with microbatch_scope(inputs.microbatches()[0]), shape_inference():
        assert add_statistic(hidden.detach(), "inside", values, index=0).requires_grad is False
    assert not statistics.counts.any()


def microbatch(statistics: StepCounts) -> Microbatch:
    return Microbatch(Batch(TOKENS, TOKENS), 1, 0, statistics=statistics)


@pytest.mark.parametrize(
    ("shape", "divided", "counted"),
    [
        ((4, 16, 2), None, False),  # a region: every rank has all positions
        ((64, 2), None, False),
        ((4, 8, 2), None, True),  # sequence parallelism
        ((32, 2), None, True),
        ((4, 16, 2), True, True),
        ((4, 8, 2), False, False),
    ],
)
def test_ranks_with_the_same_positions_count_once(shape: tuple[int, ...], divided: bool | None, counted: bool) -> None:
    for first in (True, False):
        statistics = collector({"rows": (2,)}, ranks=2, first=first)
        with microbatch_scope(microbatch(statistics)):
            hidden = torch.ones(shape, requires_grad=True)
            add_statistic(hidden, "rows", torch.tensor([1, 5]), divided=divided).sum().backward()
        assert statistics.counts.tolist() == ([1, 5] if first or counted else [0, 0])


HIDDEN = torch.ones(4, 16, 2, requires_grad=True)
ONE = torch.ones((), dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((HIDDEN, "rows", ONE), {}, "statistic 'rows': is counted by a module, but declared by neither"),
        ((HIDDEN, "features", ONE), {}, "is declared with shape [4], but a module adds values of shape [] at index []"),
        ((HIDDEN, "features", ONE), {"index": 4}, "adds values of shape [] at index [4]"),
        ((HIDDEN, "features", ONE), {"index": -1}, "at index [-1]"),
        ((HIDDEN, "features", ONE), {"index": (0, 0)}, "at index [0, 0]"),
        ((HIDDEN, "features", ONE.float()), {"index": 0}, "has values of torch.float32; count integers"),
        ((HIDDEN.detach(), "features", ONE), {"index": 0}, "is attached to a tensor without a gradient"),
        ((HIDDEN[:, :8], "features", ONE), {"index": 0}, "attached to a tensor of shape [4, 8, 2], for 4 sequences of 16"),
        ((HIDDEN.flatten(), "features", ONE), {"index": 0}, "pass divided=True if tensor-parallel ranks count different"),
    ],
)
def test_what_cannot_be_counted_is_refused(arguments: Any, keywords: Any, message: str) -> None:
    with microbatch_scope(microbatch(collector())), pytest.raises(UserError) as caught:
        add_statistic(*arguments, **keywords)
    assert message in str(caught.value)


def test_booleans_are_counted() -> None:
    statistics = collector({"rows": (2,)})
    with microbatch_scope(microbatch(statistics)):
        add_statistic(HIDDEN, "rows", torch.tensor([True, False])).sum().backward()
    assert statistics.counts.tolist() == [1, 0]


class World:
    """Two ranks with the parts of this one."""

    device = CPU
    plan = SimpleNamespace(dims=(), degrees={})

    def __init__(self, *others: dict[str, tuple[int, ...]]) -> None:
        self.others, self.summed = others, 0

    def is_first_along(self, *names: str) -> bool:
        return True

    def gather(self, value: Any) -> list[Any]:
        return [value, *([other] for other in self.others)]

    def sum(self, tensor: Tensor) -> None:
        self.summed += 1
        tensor.mul_(2)


def sums(world: Any, **statistics: tuple[int, ...]) -> StatisticSums:
    return StatisticSums(world, [ModelPart(nn.Linear(1, 1), COUNTED.layout, NextToken(), statistics=statistics)])


def test_one_collective_sums_all_statistics_of_all_stages() -> None:
    world = World({"b": (2,)})
    both = sums(world, a=(1,))
    counted = both.begin()
    counted.add("a", (0,), ONE * 2**53 + 1, divided=False)  # fp64 has no such integer
    assert {name: value.tolist() for name, value in both(counted).items()} == {"a": [2**54 + 2], "b": [0, 0]}
    assert world.summed == 1
    none = World()
    without = sums(none)
    assert without(without.begin()) == {} and none.summed == 0


def test_different_shapes_of_one_statistic_are_refused() -> None:
    with pytest.raises(UserError, match=r"statistic 'a': is declared with the shapes \[1\] and \[2\]"):
        sums(World({"a": (2,)}), a=(1,))
