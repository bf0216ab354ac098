"""A model with dropout draws the same masks, bit for bit, on any mesh and in recomputation, as on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.dropping_gpt import DROPPING, DroppingGPT
from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, run_job
from harness.masks import DIVIDED, MASKS, STEPS, train_masked
from harness.meshes import CP, PP, SCHEDULE, TP
from harness.small_gpt import definition, job_of
from titan_core.api import CausalAttention, Dropout, UserError

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


class SharedAttentionDropout(DroppingGPT):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.after = block.dropout


class AcrossBlocks(DroppingGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].dropout = self.blocks[0].dropout


class CalledTwice(DroppingGPT):
    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        h = self.embedding.dropout(self.embedding(tokens, positions))
        for block in self.blocks:
            h = block(h, documents)
        return self.output(self.norm(h))


class HeadsBeforePositions(DroppingGPT):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention.mixer = Mixer()


class Mixer(CausalAttention):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.dropout(super().forward(q, k, v, documents))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SharedAttentionDropout, r"'blocks\.0\.attention\.after' is also 'blocks\.0\.dropout', and would draw the same"),
        (AcrossBlocks, r"'blocks\.0\.dropout' is also 'blocks\.1\.dropout', and would draw the same numbers each time"),
        (CalledTwice, r"'embedding\.dropout' is called 2 times in a forward pass.*; use a separate module for each call"),
        (HeadsBeforePositions, r"attention\.mixer\.dropout' must be called with a tensor \[batch, seq, features\.\.\.\]"),
    ],
)
def test_modules_that_would_draw_the_same_numbers_twice_are_refused(
    in_tmp: Path, model: type[nn.Module], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_job(job_of(definition(model, DROPPING), DIVIDED, 1))
