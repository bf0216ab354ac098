"""Checks that the libraries of the metric loggers are installed, without importing them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from titan_core.api import JobContext, Problem
from titan_report.config import TensorBoardKeys, WandbKeys


def check_tensorboard(context: JobContext[TensorBoardKeys]) -> Iterator[Problem]:
    """Check the library for ``metrics.enable_tensorboard``."""
    return _check(context, "tensorboard")


def check_wandb(context: JobContext[WandbKeys]) -> Iterator[Problem]:
    """Check the library for ``metrics.enable_wandb``."""
    return _check(context, "wandb")


def _check(context: JobContext[Any], library: str) -> Iterator[Problem]:
    if find_spec(library) is None:
        why, fix = f"the package {library} is not installed", f"install titan-report[{library}]"
        yield context.config.problem(f"metrics.enable_{library}", why, fix)
