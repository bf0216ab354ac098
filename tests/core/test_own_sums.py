"""A dimension that sums gradients itself: wrong sums are refused before the first step, lossy ones must be declared, and
replicas of the weights that part later end the run, with the dimension, its transform and a parameter."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.ring import SumOverRing, ring_job
from titan_core.api import UserError, hookimpl
from titan_core.toolkit.checksum import checksum
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, run_job

LONG = {**TINY, "job.device": "cpu", "training.local_batch_size": 2, "training.global_batch_size": 4, "training.steps": 12}


class Damage:
    """Changes a weight on one rank after a step, in a way that torch does not count."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.steps: list[int] = []

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.run = run

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        self.steps.append(report.step)
        if report.step == self.step and self.run.world.rank == 1:
            next(self.run.parts[0].module.parameters()).data[0, 0] *= 1.0 + 1e-6


def train(
    folder: str, times: dict[int, int], damaged: int = 0, factor: float = 1.0, int8: bool = False, declared: float = 0.0
) -> tuple[list[int], str]:
    """Train on a ring of two ranks; return the steps that were taken, and the error."""
    os.chdir(folder)
    damage = Damage(damaged)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"times": times, "factor": factor, "int8": int8}.items():
            patch.setattr(SumOverRing, name, value)
        try:
            run_job(ring_job("batch", reduces=("ring",), overrides=LONG, tolerance=declared), observers=[damage])
        except UserError as error:
            return damage.steps, str(error)
    return damage.steps, ""


SUMS: dict[str, tuple[float, bool, float, str]] = {
    # Factor, whether the sum is lossy, the declared tolerance, the error
    "a factor next to 1": (1.0005, False, 0.0, "'output.weight' receives 1.0005 times its gradient on one device"),
    "a mean": (
        0.5,
        False,
        0.0,
        r"receives 0\.5 times its gradient on one device, as of a mean in place of a sum.*; 0\.02 % is allowed",
    ),
    "a factor within the tolerance": (1.005, False, 0.01, ""),
    "a factor beyond the tolerance": (1.05, False, 0.02, "'output.weight' receives 1.05 times its gradient"),
    "an undeclared sum of int8": (
        1.0,
        True,
        0.0,
        r"'output.weight' receives another .* \(it differs by 0\.\d+ %\).*MeshUse\(tolerance=\.\.\.\)",
    ),
    "a sum of int8": (1.0, True, 0.05, ""),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_as_exact_as_its_transform_declares(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    factor, int8, declared, says = SUMS[name]
    for steps, error in gloo.run(2, train, str(tmp_path), {}, 0, factor, int8, declared):
        assert re.search(says, error) and bool(error) == bool(says), error
        assert steps == ([] if says else list(range(1, 13)))
        if says:
            assert error.startswith("plugin 'ring' (titan-ring 1.0): transform 'ring': model 'tiny' on ring=2: ")
            assert "gradients are summed wrongly over ranks, because hidden states and their gradients are right" in error
            assert error.endswith("or set ring.degree = 1")


def test_a_sum_over_an_unknown_dimension_is_refused_with_the_nearest_name() -> None:
    why = r"transform 'ring': MeshUse\(sums=\.\.\.\) has 'rnig', which is no dimension of the mesh; did you mean 'ring'\?"
    with pytest.raises(UserError, match=why):
        ring_job("batch", reduces=("ring", "rnig"), overrides=LONG)


PARTED: dict[str, tuple[dict[int, int], int, int]] = {
    # Steps and how often gradients are summed in them, the step after which a weight changes, the step that must end the run
    "no sum in step 2": ({2: 0}, 0, 2),
    "no sum from step 3": (dict.fromkeys(range(3, 13), 0), 0, 10),
    "no sum in step 11": ({11: 0}, 0, 12),
    "a weight of one rank": ({}, 5, 10),
}


@pytest.mark.parametrize("name", PARTED)
def test_replicas_that_part_end_the_run(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    times, damaged, ends = PARTED[name]
    (steps, first), (_, second) = gloo.run(2, train, str(tmp_path), times, damaged)
    assert first == second, "all ranks raise the same error"
    assert first.startswith(f"step {ends}: parameter 'tok_embeddings.weight'")
    more = "" if damaged else " and 20 more"
    assert f"{more}: the ranks of mesh dimension 'ring' (ring.degree) must hold the same values, and do not" in first
    assert "fix plugin 'ring' (titan-ring 1.0): transform 'ring'" in first
    assert steps[-1] in (ends - 1, ends)


def test_replicas_that_agree_train_to_the_end(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(2, train, str(tmp_path), {}) == [(list(range(1, 13)), "")] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_a_checksum_sees_each_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(1.0, 25.0).reshape(4, 6).to(dtype)
    strided = tensor.t().contiguous().t()
    before = tensor.clone()
    assert checksum(tensor) == checksum(strided) == checksum(before)
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))
    assert int(checksum(tensor[:0])) == 0
    for index in (0, 23):
        other = tensor.clone()
        other.view(torch.uint8).flatten()[index * tensor.element_size()] ^= 1
        assert checksum(other) != checksum(tensor)


def test_a_checksum_sees_places_and_changes_that_cancel() -> None:
    tensor = torch.randn(4, 6)
    others = [tensor.t(), tensor.flip(0), tensor[:, [1, 0, 2, 3, 4, 5]], tensor.clone()]
    others[3].view(torch.int32)[0, :2] += torch.tensor([1, -1], dtype=torch.int32)
    assert len({int(checksum(one)) for one in (tensor, *others)}) == 5


def test_a_checksum_of_many_elements_is_that_of_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = checksum(tensor)
    monkeypatch.setattr("titan_core.toolkit.checksum._AT_ONCE", 64)
    assert checksum(tensor) == whole
