"""The keys that titan-report adds to ``[metrics]``, and whether their libraries are installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from titan_core.api import ALL_KEYS, JobContext, Problem, RunFolder, Section


class TensorBoardKeys(Section):
    section: ClassVar[str] = "metrics"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    save_tb_folder: RunFolder = "logs/tensorboard"
    """Folder of the event files, below the run directory."""


class WandbKeys(Section):
    section: ClassVar[str] = "metrics"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable_wandb: bool = False
    """Log to Weights & Biases. A resumed job continues the same W&B run."""
    wandb_project: str = "titan"
    """Name of the W&B project."""
    wandb_entity: str | None = None
    """Owner of the W&B project. Default: the logged-in user."""
    wandb_name: str | None = None
    """Name of the W&B run. Default: the name of the run directory."""
    wandb_mode: Literal["online", "offline"] | None = None
    """"offline" writes to the run directory, for `wandb sync` later. Default: the environment variable WANDB_MODE."""


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
