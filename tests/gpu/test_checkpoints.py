"""Checkpoints of a run on a GPU: bit for bit, also when they are written while training continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.on_device import BF16, train_on
from titan_core.api import hookimpl
from titan_testing.jobs import RunRecord, whole

pytestmark = pytest.mark.gpu

SAVING: dict[str, object] = {
    "training.steps": 8,
    "training.deterministic": "true",
    "lr_scheduler.warmup_steps": 3,
    "checkpoint.enable": "true",
    "checkpoint.interval": 3,
}


@pytest.mark.parametrize("more", [{}, BF16, {"training.enable_cpu_offload": "true"}], ids=["fp32", "bf16", "offload"])
def test_a_resumed_run_continues_bit_for_bit(device: torch.device, in_tmp: Path, more: dict[str, object]) -> None:
    def run(folder: str, **overrides: object) -> RunRecord:
        return train_on(device, {**SAVING, **more, "job.dump_folder": folder, **overrides})

    uninterrupted = run("whole")
    first = run("parts", **{"training.stop_at_step": 5})
    second = run("parts")
    assert first.losses + second.losses == uninterrupted.losses
    assert first.grad_norms + second.grad_norms == uninterrupted.grad_norms
    assert all(torch.equal(second.final[name], tensor) for name, tensor in uninterrupted.final.items())


def test_a_run_continues_on_another_device(device: torch.device, in_tmp: Path) -> None:
    train_on(device, {**SAVING, "training.stop_at_step": 5})
    here = train_on(device, {**SAVING, "job.dump_folder": "whole"})
    there = train_on(torch.device("cpu"), SAVING)
    assert there.losses == pytest.approx(here.losses[5:], rel=1e-4)


class WeightsOf:
    """Keeps copies of the weights at the end of a step, when its checkpoint is about to be taken."""

    def __init__(self, step: int) -> None:
        self.step, self.kept, self._parts = step, {}, []  # type: ignore[var-annotated]

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self._parts = run.parts

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        if report.step == self.step:
            named = [pair for part in self._parts for pair in part.module.named_parameters()]
            self.kept: dict[str, Tensor] = {name: whole(tensor).cpu() for name, tensor in named}


LARGE = "{dim = 512, n_layers = 6, n_heads = 4, n_kv_heads = 2, ffn_dim = 2048}"


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_a_background_save_holds_the_weights_of_its_step(device: torch.device, in_tmp: Path, mode: str) -> None:
    """The next updates change every weight by a large step while the copy to the host may still be under way. The model is
    large enough (100 MB with optimizer state) for copies to take longer than a step on a GPU."""
    if mode == "async_with_pinned_mem" and device.type == "cpu":
        # Without a GPU, Titan refuses the mode (tests/ckpt/test_damage.py).
        pytest.skip("async_with_pinned_mem pins host memory for a GPU, and this run is on the CPU")
    size = {"model.args": LARGE} if device.type == "cuda" else {}
    fast = {**size, "optimizer.lr": 0.01, "lr_scheduler.warmup_steps": 0, "checkpoint.interval": 2}
    settings = {**SAVING, **fast, "checkpoint.async_mode": mode}
    observer = WeightsOf(4)
    train_on(device, settings, observers=(observer,))
    # The run saves its last step too, so the step to load must be named.
    resumed = train_on(device, {**settings, "checkpoint.load_step": 4, "training.stop_at_step": 5})
    assert observer.kept.keys() == resumed.initial.keys()
    for name, tensor in observer.kept.items():
        assert torch.equal(resumed.initial[name], tensor), name


def test_saving_in_the_background_changes_nothing(device: torch.device, in_tmp: Path) -> None:
    background = {**SAVING, "checkpoint.async_mode": "async", "checkpoint.interval": 1, "job.dump_folder": "background"}
    plain = {key: value for key, value in SAVING.items() if not key.startswith("checkpoint")}
    assert train_on(device, background).losses == train_on(device, plain).losses
