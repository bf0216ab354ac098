"""Plants non-finite numbers and spikes into a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from titan_core.api import hookimpl
from titan_core.loop.finite_guard import NonFiniteError
from titan_core.toolkit.json_lines import read_lines
from titan_testing.jobs import RunRecord, run_recipe

SETTINGS: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 64}",
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 2,
    "metrics.log_freq": 1,
    "job.dump_folder": "run",
}


class Plant:
    """Spoils the output of ``module`` from step ``step`` on, or with ``gradient`` the gradient of its output."""

    def __init__(self, step: int, module: str, gradient: bool = False, until: int = 10**9) -> None:
        self.steps, self.name, self.gradient = range(step, until), module, gradient
        self.now = 0

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        for part in run.parts:
            modules = dict(part.named_modules())
            if self.name in modules:
                modules[self.name].register_forward_hook(self.spoil)

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self.now = step

    def spoil(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if self.now not in self.steps:
            return output
        if not self.gradient:
            return output * float("nan")
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output


def planted(folder: str, plant: tuple[Any, ...], overrides: dict[str, object]) -> RunRecord | str:
    os.chdir(folder)
    try:
        return run_recipe("tiny", {**SETTINGS, **overrides}, weights=True, observers=[Plant(*plant)])
    except NonFiniteError as error:
        return str(error)


@contextmanager
def read_late() -> Iterator[None]:
    """Make figures count as in flight, so that a run on the CPU reads them as late as on a GPU."""
    from titan_core.api.observe import deferred_reports
    from titan_debug.numerics import locate_nan

    with pytest.MonkeyPatch.context() as patch:
        for module in (deferred_reports, locate_nan):
            patch.setattr(module, "in_flight", lambda tensor: True)
        yield


def planted_late(folder: str, plant: tuple[Any, ...], overrides: dict[str, object]) -> RunRecord | str:
    """:func:`planted` within :func:`read_late`."""
    with read_late():
        return planted(folder, plant, overrides)


def findings(folder: Path) -> list[str]:
    return [event["message"] for event in read_lines(folder / "run/events.jsonl") if event["event"] == "finding"]


class Spike(Plant):
    """Multiplies the output by 100 instead."""

    def spoil(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * 100 if self.now in self.steps else output


SPIKES: dict[str, object] = {"numerics.spike_window": 8, "training.steps": 14}
