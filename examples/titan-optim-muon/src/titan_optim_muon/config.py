"""The config section of titan-optim-muon."""

from typing import ClassVar, Literal

from pydantic import Field

from titan_core.api import PositiveFloat, Section


class MuonSection(Section):
    section: ClassVar[str] = "gathered_muon"

    lr: PositiveFloat = 0.02
    """Peak learning rate of hidden matrices. It follows the schedule and the lr_scale of optimizer.param_groups. All other
    parameters use optimizer.lr."""
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the running mean of gradients."""
    nesterov: bool = True
    """Use Nesterov momentum: orthogonalise the gradient moved towards the running mean instead of the mean itself."""
    steps: int = Field(default=5, gt=0, le=20)
    """Number of Newton-Schulz iterations."""
    scale: Literal["original", "match_rms_adamw"] = "original"
    """How the shape of a matrix [rows, columns] scales its update. "original" scales by sqrt(max(1, rows / columns));
    "match_rms_adamw" by 0.2 sqrt(max(rows, columns)), which makes updates as large as AdamW's, so that
    gathered_muon.lr can be the learning rate of AdamW (arXiv 2502.16982)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of the iterations. Rounding to bfloat16 amplifies differences between meshes; with "float32", a run has the
    same losses on any mesh."""
