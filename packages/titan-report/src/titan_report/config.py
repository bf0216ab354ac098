"""Keys that titan-report adds to ``[metrics]``."""

from __future__ import annotations

from typing import ClassVar, Literal

from titan_core.api.run_folder import RunFolder
from titan_core.api.section import ALL_KEYS, Section


class TensorBoardKeys(Section):
    section: ClassVar[str] = "metrics"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    save_tb_folder: RunFolder = "logs/tensorboard"
    """Where, below the run's directory."""


class WandbKeys(Section):
    section: ClassVar[str] = "metrics"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable_wandb: bool = False
    """Log to Weights & Biases; a resumed job continues the same run there."""
    wandb_project: str = "titan"
    """The project there."""
    wandb_entity: str | None = None
    """Whose project. Default: yours."""
    wandb_name: str | None = None
    """The run's name there. Default: that of its directory."""
    wandb_mode: Literal["online", "offline"] | None = None
    """"offline" keeps everything in the run's directory, for `wandb sync`. Default: as the variable WANDB_MODE says."""
