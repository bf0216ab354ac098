"""A model with dropout draws the same masks, bit for bit, on any mesh and in recomputation, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.masks import DIVIDED, DROPPING, MASKS, STEPS, train_masked
from harness.small_gpt import changed, definition, job_of, layout_of
from titan_core.api import CausalAttention, Dropout, UserError
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_job
from titan_testing.meshes import CP, PP, SCHEDULE, TP

NO_SP = "parallelism.disable_sequence_parallel"
AC = "activation_checkpoint.mode"
COMPILED = {"compile.enable": "true", "compile.backend": "aot_eager"}


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, MASKS]:
    (result,) = gloo.run(1, train_masked, str(tmp_path_factory.mktemp("one")), {})
    return result


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, {AC: "full"}, marks=pytest.mark.full),
        (1, {AC: "selective"}),
        (1, {"training.local_batch_size": 4}),
        pytest.param(2, {}, marks=pytest.mark.full),
        (2, {TP: 2, AC: "full"}),
        pytest.param(2, {TP: 2, NO_SP: "true"}, marks=pytest.mark.full),
        pytest.param(2, {PP: 2, SCHEDULE: "1F1B", AC: "full"}, marks=pytest.mark.full),
        (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", AC: "selective"}),
        pytest.param(2, {CP: 2, AC: "selective"}, marks=pytest.mark.full),
        pytest.param(4, {TP: 2, CP: 2}, marks=pytest.mark.full),
        pytest.param(1, {**COMPILED, AC: "selective"}, marks=pytest.mark.full),
        pytest.param(2, {**COMPILED, TP: 2, AC: "full"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_masks_and_losses_equal_those_of_one_device(
    gloo: GlooPool, one_device: tuple[RunRecord, MASKS], tmp_path: Path, ranks: int, overrides: dict[str, object]
) -> None:
    one, expected = one_device
    found: MASKS = {}
    for record, masks in gloo.run(ranks, train_masked, str(tmp_path), overrides):
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
        for place, mask in masks.items():
            before = found.setdefault(place, mask)
            both = (before >= 0) & (mask >= 0)
            assert torch.equal(before[both], mask[both]), f"ranks draw different masks for the same elements of {place}"
            found[place] = torch.maximum(before, mask)
    if "compile.enable" not in overrides:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[place], mask) for place, mask in expected.items())


def test_every_module_and_step_has_a_different_mask(one_device: tuple[RunRecord, MASKS]) -> None:
    """Otherwise the masks compared above could be equal by construction."""
    _, masks = one_device
    assert len(masks) == STEPS * (1 + 4 * 5)
    assert all(0.02 < float((mask == 0).float().mean()) < 0.2 and mask.min() == 0 for mask in masks.values())
    assert len({mask.numpy().tobytes() for mask in masks.values()}) == len(masks)


class Mixer(CausalAttention):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.dropout(super().forward(q, k, v, documents))


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: setattr(model.blocks[0].attention, "after", model.blocks[0].dropout),
            r"'blocks\.0\.attention\.after' is also 'blocks\.0\.dropout', and would draw the same",
        ),
        (
            lambda model: setattr(model.blocks[1], "dropout", model.blocks[0].dropout),
            r"'blocks\.0\.dropout' is also 'blocks\.1\.dropout', and would draw the same numbers each time",
        ),
        (
            lambda model: model.between.update(embedded=model.embedding.dropout),
            r"'embedding\.dropout' is called 2 times in a forward pass.*; use a separate module for each call",
        ),
        (
            lambda model: setattr(model.blocks[0].attention, "mixer", Mixer()),
            r"'blocks\.0\.attention\.mixer\.dropout' must be called with a tensor \[batch, seq, features\.\.\.\]",
        ),
    ],
)
def test_modules_that_would_draw_the_same_numbers_twice_are_refused(
    in_tmp: Path, change: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_job(job_of(definition(changed(change, **DROPPING), layout_of(**DROPPING)), DIVIDED, 1))
