"""A job as numbers, and the rough cost of it. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from titan_core.api import MeshPlan, OptimizerCosts, PipelineCosts
from titan_simulate.costs import ADAMW

GIB = 2**30
STATE = "parameters, gradients, optimizer"


@dataclass(frozen=True)
class Workload:
    """A job as numbers."""

    mesh: MeshPlan
    seq_len: int
    local_batch: int
    microbatches: int
    parameter_bytes: int = 4
    """Bytes of a parameter in forward and backward."""
    reduce_bytes: int = 4
    """Bytes of a gradient that is reduced."""
    offloads: bool = False
    kept: float = 1.0
    recomputed: float = 0.0
    fused: bool = False
    matmul_type: str = "fp32"
    """Type of the matmuls of blocks."""
    wide_type: str = "fp32"
    """Type of all other matmuls."""
    parameters_stay: bool = False
    gradients_stay: bool = False
    overlaps_matmuls: bool = False
    passes_keys: bool = False
    exchanges_heads: int = 1
    exchanged_rows: float | None = None
    """Rows that ranks exchange for experts, by those that tokens choose, if their number is fixed."""
    graphed: bool = False
    host_waits: float = 0.0
    """Waits of the host in each forward pass of a block with experts."""
    pipeline: PipelineCosts | None = None
    optimizer: OptimizerCosts = ADAMW


@dataclass(frozen=True)
class Guess:
    """The rough cost of a candidate."""

    memory: Mapping[str, float]
    """Bytes by kind."""
    seconds: Mapping[str, float]
    """By kind; names of mesh dimensions and views for collectives."""

    @property
    def peak_gib(self) -> float:
        """Memory of the worst rank."""
        return sum(self.memory.values()) / GIB

    @property
    def least_gib(self) -> float:
        """Memory that no recomputation, schedule or batch split changes."""
        return (self.memory[STATE] + self.memory["context"]) / GIB

    @property
    def step_seconds(self) -> float:
        """Duration of a step."""
        return sum(self.seconds.values())


def divided(mesh: MeshPlan, what: Literal["layers", "batch", "sequence", "weights"]) -> int:
    """Return the number of ranks that divide ``what`` among them."""
    return math.prod(mesh.degrees[dim.name] for dim in mesh.dims if dim.divides == what)


def shards(mesh: MeshPlan) -> int:
    """Return the number of ranks over which data parallelism shards parameters."""
    return math.prod(mesh.degrees[name] for name in mesh.data_dims("shard"))


def views(mesh: MeshPlan) -> int:
    """Return the number of ranks over which views shard parameters."""
    return math.prod(mesh.view_degrees[view.name] for view in mesh.views if view.shards_parameters)


def folded(mesh: MeshPlan) -> int:
    """Return the number of ranks that divide weights and that views with parameters borrow."""
    own = [view for view in mesh.views if view.shards_parameters and mesh.view_degrees[view.name] > 1]
    return math.prod(mesh.degrees[name] for name in {name for view in own for name in mesh.folded(view)})
