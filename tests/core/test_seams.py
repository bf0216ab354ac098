"""No plugin drops or replaces the settings of another, and gradients are summed over ranks with different data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness import transforms
from harness.ring import Divides, ring_job
from harness.small_gpt import LAYOUT
from titan_core.api import Batch, ModelPart, UserError, Vocabulary
from titan_core.model.next_token import NextToken
from titan_core.model.part_guard import PartGuard
from titan_core.plugins.registry import Components


def apply_all(*names: str) -> ModelPart:
    parts = [ModelPart(nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(1, 1)])}), LAYOUT, NextToken())]
    guard = PartGuard(Components.from_installed())
    for name in names:
        function = getattr(transforms, name)
        parts = guard.apply(name, lambda part, function=function: function(part, None), parts[0])
    return parts[0]


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("names", "setting"),
    [
        (("wrapped_loss", "other_loss"), "objective"),
        (("offloaded", "elsewhere"), "parameters_on"),
        (("batches", "only_my_batches"), "batch_transforms"),
        (("accounts", "no_accounts"), "entries of tests.notes"),
        (("casts", "casts"), "entries of tests.casts"),
        (("casts", "bare"), "entries of tests.casts"),
        (("evaluation", "bare"), "after_evaluation"),
        (("saves_silu", "bare"), "saved_operators"),
        (("batches", "bare"), "batch_transforms"),
        (("offloaded", "bare"), "parameters_on"),
        (("accounts", "bare"), "entries of tests.notes"),
    ],
    ids=str,
)
def test_a_transforms_settings_are_not_dropped(names: tuple[str, str], setting: str) -> None:
    first, second = names
    message = f"transform '{second}': it drops or replaces the part's {setting} that transform '{first}' had set; switch one"
    with pytest.raises(UserError, match=message):
        apply_all(*names)


def test_transforms_may_build_on_each_other() -> None:
    part = apply_all("wrapped_loss", "wrapped_loss", "batches", "batches", "accounts", "accounts", "casts")
    logits, batch = torch.randn(1, 3, 5), Batch(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[0, 1, 2]]))
    loss, plain = (objective(logits, batch, Vocabulary()) for objective in (part.objective, NextToken()))
    assert loss.item() == pytest.approx((plain + 2e-3 * logits.square().sum()).item())
    assert part.entries(transforms.NOTES) == {"blocks.0": "noted"}
    assert len(part.batch_transforms) == 2
    assert isinstance(apply_all("bare").objective, NextToken)


def test_the_jobs_objective_is_not_dropped() -> None:
    with pytest.raises(UserError, match="transform 'other_loss': it drops or replaces the part's objective that was set"):
        apply_all("other_loss")


@pytest.mark.parametrize("divides", ["batch", "sequence"])
def test_a_dimension_with_different_data_needs_a_sum_of_gradients(divides: Divides) -> None:
    message = rf"ring\.degree = 2.*: mesh dimension 'ring' divides the {divides} over 2 ranks, but no transform in use sums"
    with pytest.raises(UserError, match=message) as caught:
        ring_job(divides)
    assert "MeshUse(sums=('ring',))" in str(caught.value)
    assert ring_job(divides, reduces=("ring",)).mesh.degree("ring") == 2
    assert ring_job(divides, diverges=True).mesh.diverging_replicas == 2


@pytest.mark.parametrize("divides", ["layers", "weights"])
def test_a_dimension_with_the_same_data_needs_none(divides: Divides) -> None:
    assert ring_job(divides).mesh.degree("ring") == 2
