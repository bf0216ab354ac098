"""Fixtures of the tests that run on one GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numerics() -> Iterator[None]:
    """Undo the process-wide settings that a job makes, and return its memory to the device."""
    # cuBLAS reads it when its first handle is made, and a job with training.deterministic requires it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
