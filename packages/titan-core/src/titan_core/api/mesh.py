"""The device mesh as arithmetic: which dimensions there are and how large each is. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from titan_core.api.errors import UserError


@dataclass(frozen=True)
class MeshDim:
    """A dimension of the device mesh."""

    name: str
    degree_key: str
    """The config key that holds its size."""
    divides: Literal["layers", "batch", "sequence", "weights"]
    """What its ranks divide among them: the batch's sequences, the positions of each, the layers, or each layer's weights
    (all of whose ranks then see the same tokens)."""
    copies: bool = False
    """Whether each of its ranks trains a copy of the weights of its own, apart from the others' (local SGD): gradients, and
    what they are divided and clipped by, are then the copy's. What brings the copies together is the transform's to do."""
    before: str | None = None
    """For a third party's dimension: the standard dimension that it stands in front of (outside of). Default: innermost."""


STANDARD_DIMS: tuple[MeshDim, ...] = (
    MeshDim("pp", "parallelism.pipeline_parallel_degree", "layers"),
    MeshDim("dp_replicate", "parallelism.data_parallel_replicate_degree", "batch"),
    MeshDim("dp_shard", "parallelism.data_parallel_shard_degree", "batch"),
    MeshDim("cp", "parallelism.context_parallel_degree", "sequence"),
    MeshDim("tp", "parallelism.tensor_parallel_degree", "weights"),
)
"""From the outermost, which communicates least, to the innermost, which communicates most and belongs on the fastest
links (TorchTitan paper, section 2.2)."""


REMAINDER_KEY = "parallelism.data_parallel_shard_degree"


@dataclass(frozen=True)
class MeshPlan:
    """The mesh of a job: every dimension with its degree, outermost first, ones included."""

    dims: tuple[MeshDim, ...]
    degrees: Mapping[str, int]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def batch_degree(self) -> int:
        """Number of ranks (or groups of ranks) that see different sequences."""
        return math.prod(self.degrees[dim.name] for dim in self.dims if dim.divides == "batch")

    @property
    def copies(self) -> int:
        """How many copies of the weights are trained apart from each other."""
        return math.prod(self.degrees[dim.name] for dim in self.dims if dim.copies)

    def degree(self, name: str) -> int:
        """Size of dimension ``name``; 1 where the job has no such dimension."""
        return self.degrees.get(name, 1)

    def __str__(self) -> str:
        shown = [f"{name}={degree}" for name, degree in self.degrees.items() if degree > 1]
        return " x ".join(shown) or "one device"


def dims_in_order(extra: Iterable[MeshDim]) -> tuple[MeshDim, ...]:
    """The standard dimensions with third parties' ``extra`` ones in their places."""
    dims = list(STANDARD_DIMS)
    for dim in extra:
        if dim in dims:
            continue
        names = [known.name for known in dims]
        if dim.name in names:
            raise UserError.one(f"mesh dimension {dim.name!r}", "two plugins define it", "switch one of them off")
        dims.insert(names.index(dim.before) if dim.before in names else len(dims), dim)
    return tuple(dims)
