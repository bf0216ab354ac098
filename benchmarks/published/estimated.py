"""The estimate of a published run, with what its trainer had in place of Titan's own parts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.published.row import Row, Trainer
from titan_core.api import Phase, Ref, Transform
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.registry import Components
from titan_simulate.engine import stub_libraries
from titan_simulate.hardware.machine import Machine
from titan_simulate.hardware.read import read_machine

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate

ROOT = Path(__file__).parents[2]

UNCOMPILED_LOSS = {"objective.chunk_tokens": str(2**40), "compile.components": '["model"]'}
"""Settings of a loss of all logits: one chunk, eager."""


def as_published(trainer: Trainer, job: AssembledJob) -> AssembledJob:
    """Return ``job`` with the loss and the ring attention of ``trainer`` in place of Titan's."""
    if trainer.full_logits:
        job = replace(job, objective=replace(job.objective, build=Ref("benchmarks.published.loss:full_logits")))
    if trainer.ring:
        ring = Transform(
            name="published_ring",
            summary="the ring attention of TorchTitan's published runs",
            phase=Phase.DATA,
            apply=Ref("benchmarks.published.ring:stand_in_for_rings"),
            active=lambda context: True,
        )
        job = replace(job, transforms=(*job.transforms, ring))
    return job


def with_flash_attention(machine: Machine) -> Machine:
    """Return ``machine`` with FlashAttention 2 in place of the kernel that Titan prefers."""
    if machine.attention.flash is None:
        return machine
    changes = {**machine.attention.flash.model_dump(), "kernel": "flash", "flash": None}
    return machine.model_copy(update={"attention": machine.attention.model_copy(update=changes)})


def assemble_row(row: Row, more: Sequence[Override] = ()) -> AssembledJob:
    """Return the job of a row, with further settings. Imports no torch."""
    settings = {**row.options, **(UNCOMPILED_LOSS if row.trainer.full_logits else {})}
    own = [Override(key, value) for key, value in settings.items()]
    config, registry = load_config(row.recipe, [*own, *more], Components.from_installed())
    return assemble(config, registry, row.ranks, missing_ok=True)


def estimated(row: Row) -> Estimate:
    """Return the estimate of a row, in this process, which must not have imported torch."""
    stub_libraries.load()
    from titan_core.loop.training import train
    from titan_simulate.estimate.estimate import estimate

    machine = read_machine(row.device)
    if row.trainer.flash:
        machine = with_flash_attention(machine)
    change: Callable[[AssembledJob], AssembledJob] = partial(as_published, row.trainer)
    return estimate(partial(assemble_row, row), train, machine, change=change)


def predict(row: Row) -> dict[str, Any]:
    """Return the estimate of a row, made in a new process, as plain values."""
    command = [sys.executable, "-m", "benchmarks.published", row.name, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{row.name}: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
