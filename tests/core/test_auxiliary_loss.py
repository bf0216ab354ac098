"""Auxiliary losses of modules count once per position of the global batch, with any recomputation and accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.objectives import first_step
from harness.small_gpt import LAYOUT, VOCAB, SmallGPT
from titan_core.api import Batch, ModelPart, StepInput, add_auxiliary_loss
from titan_core.api.parallel.microbatch import AuxiliaryLosses
from titan_core.api.parallel.step import GradientAccumulation
from titan_core.model.loss_head import attach
from titan_core.model.next_token import NextToken

TOKENS = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))
POSITIONS = TOKENS.numel()


def penalised(module: nn.Module, recompute: bool) -> None:
    """Add the squares of the output of ``module`` as an auxiliary loss."""
    forward = module.forward

    def with_loss(*arguments: Any) -> Tensor:
        hidden = forward(*arguments)
        return add_auxiliary_loss(hidden, "squares", 0.1 * hidden.square().sum())

    module.forward = (lambda *arguments: checkpoint(with_loss, *arguments, use_reentrant=False)) if recompute else with_loss


def step(local: int, recompute: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    part = ModelPart(SmallGPT(), LAYOUT, NextToken())
    attach(part, 0)
    penalised(part.module.get_submodule("blocks.0"), recompute)
    losses = AuxiliaryLosses(1 / POSITIONS)
    inputs = StepInput(Batch(TOKENS, TOKENS).split(local), 1, 0, float(POSITIONS), losses)
    loss = GradientAccumulation(part)(inputs)
    return losses.values, {name: one.grad for name, one in part.module.named_parameters() if one.grad is not None}, loss


@pytest.mark.parametrize("local", [4, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_equals_that_of_a_summed_loss(local: int, recompute: bool) -> None:
    values, gradients, loss = step(local, recompute)
    torch.manual_seed(0)
    model = SmallGPT()
    hidden: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda module, arguments, output: hidden.append(output))
    logits = model(TOKENS)
    main = nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())
    squares = 0.1 * hidden[0].square().sum() / POSITIONS
    (main + squares).backward()
    assert loss.item() == pytest.approx(main.item(), rel=1e-6)
    assert {name: value.item() for name, value in values.items()} == {"squares": pytest.approx(squares.item(), rel=1e-6)}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_nothing_is_added_outside_training() -> None:
    part = ModelPart(SmallGPT(), LAYOUT, NextToken())
    attach(part, 0)
    penalised(part.module.get_submodule("blocks.0"), recompute=False)
    part.forward_loss(first_step(Batch(TOKENS, TOKENS))).backward()  # without a step's AuxiliaryLosses
    losses = AuxiliaryLosses(1.0)
    run = GradientAccumulation(part)
    run.evaluate(StepInput([Batch(TOKENS, TOKENS)], 1, 0, 1.0, losses))
    assert losses.values == {}
    hidden = torch.ones(2, requires_grad=True)
    assert add_auxiliary_loss(hidden, "squares", hidden.sum()) is hidden
