"""Candidate values and costs of a transform or an optimizer, for planning a job. Free of torch.

A transform's mesh dimensions and views say which degrees exist. ``Transform.choices`` adds values of other keys that change
where and how fast a job computes. What blocks cost is traced; ``Transform.costs`` says what no trace of a few blocks shows:
the stages and microbatches of a pipeline, what the compiler fuses, and whether blocks remain alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def _require_figures(holder: object) -> None:
    """
    Raises:
        ValueError: a number of ``holder`` is negative or not finite.
    """
    for name, value in vars(holder).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(0 <= one < math.inf for one in numbers if isinstance(one, int | float)):
            raise ValueError(f"{name} = {value}; it must be finite, and at least 0")


@dataclass(frozen=True, kw_only=True)
class PipelineCosts:
    """Stages of successive modules, on ranks of a mesh dimension that divides the layers."""

    stages: tuple[tuple[str, ...], ...]
    """Module names of each stage: units of the embedding, blocks, and units of the head."""
    rank_of: tuple[int, ...]
    """Rank along the dimension that holds each stage."""
    microbatch_size: int
    """Sequences of a microbatch."""
    microbatches: int
    """Microbatches of an optimizer step."""
    alive: tuple[float, ...]
    """By rank: most microbatches whose activations are alive at once, in all stages of the rank."""
    idle: float
    """Time that a rank waits for others, relative to the time that it computes."""

    def __post_init__(self) -> None:
        _require_figures(self)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What an active transform changes about a step, beside what a trace of a few blocks shows."""

    fused: bool = False
    """Whether the pointwise operators of blocks run as few kernels."""
    fused_loss: bool = False
    """Whether those of the loss do."""
    overlaps_matmuls: bool = False
    """Whether the collectives around the matmuls of a block run beside them, piece by piece."""
    exchanged_rows: float | None = None
    """Rows that the ranks of a view exchange for experts, relative to those that their tokens choose, if their number is
    fixed. ``None``: as many as tokens choose."""
    host_waits: float = 0.0
    """How often the host waits for the device in each forward pass of a block with experts."""
    graphed: bool = False
    """Whether the host launches forward and backward pass at once, as a CUDA graph, instead of each kernel."""
    blocks_alike: bool = True
    """Whether equal blocks remain equal, so that an estimate may simulate a few of them. ``False`` if the transform treats
    blocks by their number, or several of them together."""
    matmul_type: str | None = None
    """Type in which the linear layers of blocks are multiplied, if it is not that of their parameters: ``"fp8"``."""
    parameters_stay: bool = False
    """Whether parameters that data parallelism shards stay gathered from forward to backward, on all blocks."""
    gradients_stay: bool = False
    """Whether the gradients of all microbatches are summed before data parallelism reduces them."""
    after_update_traffic: float = 0.0
    """Bytes of the device's memory that are read and written after an update, for each element of a trained parameter on a
    rank."""
    after_update_copies: float = 0.0
    """Bytes that are copied between host and device after an update, for each of these elements. Copies, and the traffic of
    a transform that has some, run beside the next step, and only the next update waits for them."""
    after_update_every: int = 1
    """After every how many updates that happens."""
    pipeline: PipelineCosts | None = None
    """Set by the transform of a dimension that divides the layers."""

    def __post_init__(self) -> None:
        _require_figures(self)
        if self.after_update_every < 1:
            raise ValueError(f"after_update_every = {self.after_update_every}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class OptimizerCosts:
    """What an optimizer keeps, and what its update takes. The matrices of blocks, experts included, may differ from all
    other parameters. Bytes are those of an element of a parameter on a rank, unless noted otherwise."""

    state_bytes: float
    """Bytes of state."""
    matrix_state_bytes: float | None = None
    """State of matrices of blocks; ``None``: as of other parameters."""
    blocks_alike: bool = True
    """Whether the costs of equal blocks add up, so that an estimate may simulate a few of them. ``False`` if the ranks
    divide all matrices among them."""

    def __post_init__(self) -> None:
        _require_figures(self)
