"""Seeds and determinism."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from titan_core.api import World
from titan_core.api.config.sections import TrainingSection

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable without which cuBLAS refuses deterministic products."""


@contextmanager
def numerics_as_before() -> Iterator[None]:
    """Undo, however the block ends, what :func:`prepare_numerics` has set for the whole process, except the seeds. A job
    that is deterministic, or less precise, would otherwise make the next job of the process so."""
    deterministic = torch.utils.deterministic
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # as below
    workspace = os.environ.get(_WORKSPACE)
    try:
        yield
    finally:
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark


def prepare_numerics(training: TrainingSection, world: World) -> None:
    """Set matmul precision, determinism, and seed the global generators, from which a model may draw in training (dropout).

    Weights and data do not depend on these generators. Ranks that see the same tokens get the same seed.
    """
    torch.set_float32_matmul_precision(training.float32_matmul_precision)
    if training.deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling new memory takes time, and nothing here reads uninitialised memory.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (a property that type checkers do not know)
        torch.backends.cudnn.benchmark = False
    seed = (training.seed * 1_000_003 + world.data_rank) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
