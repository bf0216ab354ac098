"""What a comparison measures: speed, or what the model learns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from titan_core.api import Checkpoint, Component, Observer, Registry, Transform
from titan_core.api.config.sections import CORE_SECTIONS

Purpose = Literal["speed", "loss"]

SPEED_STEPS = 20
"""Steps of each run of a comparison of speed, unless the user requests another number."""

_HOW_IT_RUNS: tuple[type[Component], ...] = (Transform, Checkpoint, Observer)
"""Kinds of components whose sections say how a job runs, and not what it learns."""
_CORE_SECTIONS = {"job", "comm", "parallelism", "metrics", "plugins"}
_CORE_KEYS = {
    "training.local_batch_size", "training.mixed_precision_param", "training.mixed_precision_reduce",
    "training.enable_cpu_offload", "training.float32_matmul_precision", "training.deterministic",
    "data.num_workers", "data.prefetch", "optimizer.implementation",
}  # fmt: skip
"""Keys of sections of the core that change how fast a job computes the same steps, up to rounding."""


def purpose_of(keys: Iterable[str], registry: Registry) -> Purpose:
    """Return "loss" if any of ``keys``, in which the variants differ, decides what is learned, such as a learning rate."""
    core = {section.section for section in CORE_SECTIONS}
    sections = {
        component.config.section
        for kind in _HOW_IT_RUNS
        for component in registry.all(kind)
        if component.config is not None and component.config.section not in core
    }
    how = _CORE_SECTIONS | sections
    return "speed" if all(key in _CORE_KEYS or key.partition(".")[0] in how for key in keys) else "loss"
