"""The device mesh as arithmetic: its dimensions, how large each is, and which see different data. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from titan_core.api.errors import UserError


@dataclass(frozen=True)
class MeshDim:
    """A dimension of the device mesh. It multiplies the number of ranks."""

    name: str
    degree_key: str
    """The config key that holds its size."""
    divides: Literal["layers", "batch", "sequence", "weights"]
    """What its ranks divide among them: the batch's sequences, the positions of each, the layers, or each layer's weights
    (all of whose ranks then see the same tokens)."""
    diverges: bool = False
    """Whether each rank trains a replica of its own, whose weights may diverge from the others' (local SGD). Gradients are
    summed, normalised and clipped within a replica; the transform that declares the dimension synchronises replicas."""
    before: str | None = None
    """For a third party's dimension: the standard dimension that it stands in front of (outside of). Default: innermost."""
    data_parallel: Literal["shard", "replicate", "own"] = "shard"
    """How data parallelism treats a dimension that divides the batch or the sequence. ``shard``: it shards parameters over
    the dimension and reduce-scatters gradients (FSDP). ``replicate``: each rank keeps the parameters, and gradients are
    all-reduced, which suits slow links (HSDP, DDP). ``own``: data parallelism leaves the dimension alone; the transform that
    declares it sums gradients over it, and says so in ``reduces``."""

    @property
    def sees_other_data(self) -> bool:
        """Whether its ranks hold the same weights and see different tokens, so that gradients must be summed over them."""
        return self.divides in ("batch", "sequence") and not self.diverges


@dataclass(frozen=True)
class MeshView:
    """Another way to fold dimensions of the mesh. It does not multiply the number of ranks.

    The ranks of the dimensions in ``borrows`` are folded anew into two dimensions: the inner one, called ``name``, has the
    view's degree and joins neighbouring ranks, and the outer one has what remains. A parameter that a transform divides over
    the view (experts, under expert parallelism) is complete over it: data parallelism works for it on the remainder, and on
    the data dimensions that the view does not borrow.
    """

    name: str
    degree_key: str
    """The config key that holds its size, which divides the number of ranks that it borrows."""
    borrows: tuple[str, ...] = ("dp_shard", "cp")
    """The dimensions that it folds anew, outermost first. Their ranks see different data."""

    @property
    def remainder(self) -> str:
        """Name of the dimension that remains of what the view borrows."""
        return f"{self.name}_remainder"


STANDARD_DIMS: tuple[MeshDim, ...] = (
    MeshDim("pp", "parallelism.pipeline_parallel_degree", "layers"),
    MeshDim("dp_replicate", "parallelism.data_parallel_replicate_degree", "batch", data_parallel="replicate"),
    MeshDim("dp_shard", "parallelism.data_parallel_shard_degree", "batch"),
    MeshDim("cp", "parallelism.context_parallel_degree", "sequence"),
    MeshDim("tp", "parallelism.tensor_parallel_degree", "weights"),
)
"""From the outermost, which communicates least, to the innermost, which communicates most and belongs on the fastest
links (TorchTitan paper, section 2.2)."""


REMAINDER_KEY = "parallelism.data_parallel_shard_degree"


@dataclass(frozen=True)
class MeshPlan:
    """The mesh of a job: every dimension with its degree, outermost first, ones included; and its views."""

    dims: tuple[MeshDim, ...]
    degrees: Mapping[str, int]
    """Of the dimensions."""
    views: tuple[MeshView, ...] = ()
    view_degrees: Mapping[str, int] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def batch_degree(self) -> int:
        """Number of ranks (or groups of ranks) that see different sequences."""
        return math.prod(self.degrees[dim.name] for dim in self.dims if dim.divides == "batch")

    @property
    def data_degree(self) -> int:
        """Number of ranks (or groups of ranks) that see different tokens."""
        return math.prod(self.degrees[dim.name] for dim in self.dims if dim.divides in ("batch", "sequence"))

    @property
    def diverging_replicas(self) -> int:
        """Number of replicas of the model whose weights may diverge; 1 where all ranks train the same weights."""
        return math.prod(self.degrees[dim.name] for dim in self.dims if dim.diverges)

    def degree(self, name: str) -> int:
        """Size of the dimension or view ``name``; 1 where the job has none of that name."""
        return self.degrees.get(name, self.view_degrees.get(name, 1))

    def data_dims(self, how: Literal["shard", "replicate"]) -> tuple[str, ...]:
        """The dimensions that data parallelism shards or replicates parameters over, outermost first."""
        return tuple(dim.name for dim in self.dims if dim.sees_other_data and dim.data_parallel == how)

    def borrowed(self, view: MeshView) -> int:
        """Number of ranks that ``view`` folds anew."""
        return math.prod(self.degrees[name] for name in view.borrows)

    def __str__(self) -> str:
        shown = [f"{name}={degree}" for name, degree in self.degrees.items() if degree > 1]
        views = [f"{name}={degree}" for name, degree in self.view_degrees.items() if degree > 1]
        return ", ".join([" x ".join(shown), *views]) if shown else "one device"


def dims_in_order(extra: Iterable[MeshDim]) -> tuple[MeshDim, ...]:
    """The standard dimensions with third parties' ``extra`` ones in their places.

    Raises:
        UserError: two plugins define a dimension of one name.
    """
    dims = list(STANDARD_DIMS)
    for dim in extra:
        if dim in dims:
            continue
        names = [known.name for known in dims]
        if dim.name in names:
            raise UserError.one(f"mesh dimension {dim.name!r}", "two plugins define it", "switch one of them off")
        dims.insert(names.index(dim.before) if dim.before in names else len(dims), dim)
    return tuple(dims)


def sound_views(views: Iterable[MeshView], dims: Collection[MeshDim]) -> tuple[MeshView, ...]:
    """``views``, each once.

    Raises:
        UserError: two plugins define one name, or a view borrows what it cannot.
    """
    known = {dim.name: dim for dim in dims}
    sound: dict[str, MeshView] = {}
    for view in views:
        if sound.get(view.name) == view:
            continue
        where = f"mesh view {view.name!r}"
        if taken := {view.name, view.remainder} & {*known, *sound, *(one.remainder for one in sound.values())}:
            raise UserError.one(where, f"two plugins define {sorted(taken)[0]!r}", "switch one of them off")
        fix = "switch its plugin off; the plugin should borrow dimensions that divide the batch or the sequence"
        if not view.borrows:
            raise UserError.one(where, "it borrows no dimension", fix)
        for name in view.borrows:
            if name not in known:
                raise UserError.one(where, f"it borrows {name!r}, which is no mesh dimension", fix)
            if not known[name].sees_other_data:
                raise UserError.one(where, f"it borrows {name!r}, whose ranks do not share weights and divide the data", fix)
        if len({known[name].data_parallel for name in view.borrows}) != 1 or known[view.borrows[0]].data_parallel == "own":
            why = f"it borrows {' and '.join(view.borrows)}, which data parallelism does not treat alike"
            raise UserError.one(where, why, "switch its plugin off; the plugin should borrow dimensions of one kind")
        sound[view.name] = view
    return tuple(sound.values())
