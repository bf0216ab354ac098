"""The config sections of Muon, of averaged weights, and of muP."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from titan_core.api import PositiveFloat, PositiveInt, Section

DECAY = 0.999
MUP_OPTIMIZER = "MuAdamW"
AVERAGED = "averaged"
"""Name of the validations of averages."""


class FusedSpec(BaseModel):
    """Matrices that are stored as one along their rows."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    pattern: str
    """Shell wildcards for the parameter's fully qualified name, e.g. "*.qkv.weight"."""
    rows: list[Annotated[int, Field(gt=0, le=2**18)]] = Field(min_length=2, max_length=64)
    """Rows of each matrix, in proportion: [4, 1, 1] for queries with four times as many heads as keys and values."""


class MuonSection(Section):
    section: ClassVar[str] = "muon"
    may_change: ClassVar[tuple[str, ...]] = ("buffer_mib",)

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
    "match_rms_adamw" by 0.2 sqrt(max(rows, columns)), which makes updates as large as AdamW's, so that muon.lr can be the
    learning rate of AdamW (arXiv 2502.16982)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of the iterations, and of what ranks exchange for them. Rounding to bfloat16 amplifies differences between
    meshes; with "float32", a run has the same losses on any mesh."""
    exclude: list[str] = Field(default=[], max_length=1000)
    """Patterns of hidden matrices that AdamW updates, e.g. ["*.router.weight"]."""
    fused: list[FusedSpec] = Field(default=[], max_length=1000)
    """Parameters that hold several matrices one below the other, such as the projections of queries, keys and values. Each
    matrix is orthogonalised by itself. Without an entry, the parameter is one matrix; stacked experts need no entry."""
    buffer_mib: PositiveInt = 512
    """Memory of a rank for whole matrices at a time, in MiB; at least one matrix."""


class AveragesSection(Section):
    section: ClassVar[str] = "averages"
    may_change: ClassVar[tuple[str, ...]] = ("validate_averages", "enable_cpu_offload")

    kind: Literal["none", "exponential", "mean"] = "none"
    """Keep averages of the weights: "exponential", in which newer states weigh more, or the "mean" of all states. They are
    saved with checkpoints, and take the memory of the weights once more."""
    decay: float = Field(default=DECAY, gt=0.0, lt=1.0)
    """Weight of the average so far, each time that "exponential" averages: 0.999 remembers about 1,000 states."""
    freq: PositiveInt = 1
    """Average the weights after every this many steps."""
    start_step: PositiveInt = 1
    """The first step whose weights are averaged."""
    validate_averages: bool = True
    """Also measure the validation loss of the averages, whenever validation is due."""
    enable_cpu_offload: bool = False
    """Keep the averages in the memory of the host instead of the device's. They have the same values; each time that they
    are taken, they go to the device and back, beside the next step."""


class MuPSection(Section):
    section: ClassVar[str] = "mup"

    base: dict[str, Annotated[int, Field(gt=0, le=2**18)]] = Field(default={}, max_length=100)
    """Arguments of the base model that differ from model.args: widths, and numbers of heads. The settings of the job are
    those that are best for the base model. For optimizer.name = "MuAdamW"."""
