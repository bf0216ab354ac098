"""Runs on the device of the tests marked ``gpu``, and what they have in common."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from titan_testing.jobs import RunRecord, run_recipe

SMALL: dict[str, object] = {
    "model.args": "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}",
    "training.seq_len": 64,
    "training.local_batch_size": 4,
    "training.global_batch_size": 4,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 2,
    "metrics.log_freq": 2,
}
"""Settings of ``tiny`` whose sizes suit the kernels of a GPU: every matrix dimension is a multiple of 16."""

BF16: dict[str, object] = {"training.mixed_precision_param": "bfloat16"}


def train_on(
    device: torch.device, overrides: dict[str, object] | None = None, recipe: str = "tiny", observers: tuple[Any, ...] = ()
) -> RunRecord:
    """Train ``recipe`` in this process; return its record, with all tensors in host memory."""
    settings = {**SMALL, **(overrides or {}), "job.device": device.type}
    return in_host_memory(run_recipe(recipe, settings, weights=True, observers=observers))


def in_host_memory(record: RunRecord) -> RunRecord:
    """Move the tensors of ``record`` to host memory, so that it can be compared and sent to other processes."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, dict):
            moved = {name: entry.cpu() if isinstance(entry, Tensor) else entry for name, entry in value.items()}
            setattr(record, field.name, moved)
    return record


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of ``expected``, in double precision."""
    exact = expected.double()
    return float((found.double() - exact).norm() / exact.norm())
