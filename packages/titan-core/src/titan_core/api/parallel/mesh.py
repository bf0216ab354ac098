"""The device mesh as arithmetic: its dimensions, their sizes, and which of them see different data. Free of torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from titan_core.api.plugins.errors import UserError


@dataclass(frozen=True)
class MeshDim:
    """A dimension of the device mesh. It multiplies the number of ranks."""

    name: str
    """Unique among dimensions and views; selects it in ``context.mesh[name]`` and in :attr:`MeshUse.sums`."""
    degree_key: str
    """Config key that sets its size."""
    divides: Literal["layers", "batch", "sequence", "weights"]
    """What is divided among its ranks: the layers, the sequences of the batch, the positions of each sequence, or the
    weights of each layer (in which case all its ranks see the same tokens)."""
    diverges: bool = False
    """Whether each rank trains its own replica, whose weights may diverge from those of the others (local SGD). Gradients
    are summed, normalised and clipped within a replica; the transform that declares the dimension synchronises replicas."""
    before: str | None = None
    """For a third party's dimension: the standard dimension just inside it. Default: the new dimension is innermost."""
    data_parallel: Literal["shard", "replicate", "own"] = "shard"
    """How data parallelism handles a dimension that divides the batch or the sequence. ``shard``: it shards parameters over
    the dimension and reduce-scatters gradients (FSDP). ``replicate``: parameters are replicated and gradients all-reduced,
    which suits slow links (HSDP, DDP). ``own``: data parallelism ignores the dimension; the transform that declares it sums
    gradients over it and lists it in :attr:`MeshUse.sums`."""
    takes_rest: bool = False
    """Whether its degree may be -1: all ranks that the other dimensions leave. The mesh of a job has such a dimension also
    at degree 1, so that a transform may shard over it on any number of ranks."""
    whole_positions_key: str | None = None
    """Of a dimension that divides weights: config key that, if true, keeps all positions on each of its ranks outside
    regions. Otherwise they hold different positions there (sequence parallelism), so that a view may borrow the dimension
    (:attr:`MeshView.folds_weights`). ``None``: each holds all of them."""

    @property
    def sees_different_data(self) -> bool:
        """Whether its ranks hold the same weights but see different tokens, so that gradients must be summed over them."""
        return self.divides in ("batch", "sequence") and not self.diverges


@dataclass(frozen=True)
class MeshView:
    """Another way to fold dimensions of the mesh. It does not multiply the number of ranks.

    The ranks of the dimensions in ``borrows`` are refolded into two dimensions. The inner one, called ``name``, has the
    view's degree and connects neighbouring ranks; the outer one, the remainder, has the rest. If a transform shards a
    parameter over the view (experts, under expert parallelism), the ranks of the view together hold it once. Data
    parallelism then handles it over the remainder, and over the data dimensions that the view does not borrow.
    """

    name: str
    """Unique among dimensions and views; selects the inner dimension in ``context.mesh[name]``."""
    degree_key: str
    """Config key that sets its size, which must divide the number of ranks that the view borrows."""
    borrows: tuple[str, ...]
    """The dimensions that are refolded, outermost first. Their ranks see different data, or different positions
    (:attr:`folds_weights`)."""
    shards_parameters: bool = True
    """Whether transforms may shard parameters over it. Otherwise its ranks exchange only activations, so that its degree
    changes neither what a rank holds nor how data parallelism reduces it."""
    folds_weights: bool = False
    """Whether the last dimensions in ``borrows`` may divide weights. The view has their ranks in jobs in which they hold
    different positions outside regions, where a transform may then shard parameters over the view. A parameter that is
    sharded over it must not be sharded over a dimension that it borrows. In other jobs the view does not borrow them."""

    @property
    def remainder(self) -> str:
        """Name of the dimension that remains of the borrowed ones."""
        return f"{self.name}_remainder"


STANDARD_DIMS: tuple[MeshDim, ...] = (
    MeshDim("pp", "parallelism.pipeline_parallel_degree", "layers"),
    MeshDim("dp_replicate", "parallelism.data_parallel_replicate_degree", "batch", data_parallel="replicate"),
    MeshDim("dp_shard", "parallelism.data_parallel_shard_degree", "batch", takes_rest=True),
    MeshDim("cp", "parallelism.context_parallel_degree", "sequence"),
    MeshDim(
        "tp",
        "parallelism.tensor_parallel_degree",
        "weights",
        whole_positions_key="parallelism.disable_sequence_parallel",
    ),
)
"""From outermost (least communication) to innermost (most communication, so on the fastest links); see the TorchTitan paper,
section 2.2."""


@dataclass(frozen=True)
class MeshPlan:
    """The mesh of a job: every dimension with its degree, outermost first and including degree 1, and its views."""

    dims: tuple[MeshDim, ...]
    """All dimensions, outermost first."""
    degrees: Mapping[str, int]
    """Size of each dimension, by name."""
    views: tuple[MeshView, ...] = ()
    """The views that transforms add."""
    view_degrees: Mapping[str, int] = field(default_factory=dict)
    """Size of each view, by name."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def batch_degree(self) -> int:
        """Number of ranks, or groups of ranks, that see different sequences."""
        return math.prod(self.degrees[dim.name] for dim in self.dims if dim.divides == "batch")

    @property
    def data_degree(self) -> int:
        """Number of ranks, or groups of ranks, that see different tokens."""
        return math.prod(self.degrees[dim.name] for dim in self.dims if dim.divides in ("batch", "sequence"))

    @property
    def diverging_replicas(self) -> int:
        """Number of replicas whose weights may diverge; 1 if all ranks train the same weights."""
        return math.prod(self.degrees[dim.name] for dim in self.dims if dim.diverges)

    @property
    def replicas(self) -> list[list[int]]:
        """The ranks that train each diverging replica of the weights."""
        ranks: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(itertools.product(*(range(self.degrees[dim.name]) for dim in self.dims))):
            replica = tuple(index for index, dim in zip(place, self.dims, strict=True) if dim.diverges)
            ranks.setdefault(replica, []).append(rank)
        return list(ranks.values())

    @property
    def degree_keys(self) -> frozenset[str]:
        """Config keys of sizes that decide where a job computes, and not what it trains. Without those of dimensions that
        diverge."""
        dims = {dim.degree_key for dim in self.dims if not dim.diverges}
        return frozenset(dims | {view.degree_key for view in self.views})

    def degree(self, name: str) -> int:
        """Return the size of the dimension or view ``name``; 1 if the job does not have it."""
        return self.degrees.get(name, self.view_degrees.get(name, 1))

    def data_dims(self, how: Literal["shard", "replicate"]) -> tuple[str, ...]:
        """Return the dimensions over which data parallelism shards or replicates parameters, outermost first."""
        return tuple(dim.name for dim in self.dims if dim.sees_different_data and dim.data_parallel == how)

    def folded(self, view: MeshView) -> tuple[str, ...]:
        """Return the dimensions larger than 1 that divide weights and that ``view`` borrows."""
        return tuple(
            dim.name
            for dim in self.dims
            if dim.divides == "weights" and dim.name in view.borrows and self.degrees[dim.name] > 1
        )

    def borrowed(self, view: MeshView) -> int:
        """Return the number of ranks that ``view`` refolds."""
        return math.prod(self.degrees[name] for name in view.borrows)

    def __str__(self) -> str:
        shown = [f"{name}={degree}" for name, degree in self.degrees.items() if degree > 1]
        views = [f"{name}={degree}" for name, degree in self.view_degrees.items() if degree > 1]
        return ", ".join([" x ".join(shown), *views]) if shown else "one device"


def dims_in_order(extra: Iterable[MeshDim]) -> tuple[MeshDim, ...]:
    """Return the standard dimensions with the ``extra`` ones of third parties inserted.

    Raises:
        UserError: two plugins define a dimension of the same name, or one is before a dimension that is not standard.
    """
    dims = list(STANDARD_DIMS)
    for dim in extra:
        if dim in dims:
            continue
        names = [known.name for known in dims]
        if dim.name in names:
            raise UserError.one(f"mesh dimension {dim.name!r}", "two plugins define it", "disable one of them")
        standard = [known.name for known in STANDARD_DIMS]
        if dim.before is not None and dim.before not in standard:
            why = f"before = {dim.before!r} is no standard dimension"
            raise UserError.one(f"mesh dimension {dim.name!r}", why, f"its plugin must name one of {', '.join(standard)}")
        dims.insert(len(dims) if dim.before is None else names.index(dim.before), dim)
    return tuple(dims)


def sound_views(views: Iterable[MeshView], dims: Collection[MeshDim]) -> tuple[MeshView, ...]:
    """Return ``views`` without repetitions.

    Raises:
        UserError: two plugins define the same name, or a view borrows dimensions that it cannot borrow.
    """
    known = {dim.name: dim for dim in dims}
    sound: dict[str, MeshView] = {}
    for view in views:
        if sound.get(view.name) == view:
            continue
        where = f"mesh view {view.name!r}"
        if taken := {view.name, view.remainder} & {*known, *sound, *(other.remainder for other in sound.values())}:
            raise UserError.one(where, f"two plugins define {sorted(taken)[0]!r}", "disable one of them")
        fix = "borrow dimensions that divide the batch or the sequence, or disable the plugin"
        if not view.borrows:
            raise UserError.one(where, "borrows no dimension", fix)
        for name in view.borrows:
            if name not in known:
                raise UserError.one(where, f"borrows {name!r}, which is not a mesh dimension", fix)
            folded = view.folds_weights and known[name].divides == "weights"
            if not folded and not known[name].sees_different_data:
                why = f"borrows {name!r}, whose ranks see the same tokens or train diverging replicas"
                raise UserError.one(where, why, fix)
        data = [name for name in view.borrows if known[name].divides != "weights"]
        if list(view.borrows[: len(data)]) != data or not data:
            why = f"borrows {' and '.join(view.borrows)}, of which a dimension that divides weights is not innermost"
            raise UserError.one(where, why, "name dimensions of data parallelism first, or disable the plugin")
        if len({known[name].data_parallel for name in data}) != 1 or known[data[0]].data_parallel == "own":
            why = f"borrows {' and '.join(data)}, which data parallelism does not handle in the same way"
            raise UserError.one(where, why, "borrow dimensions of one kind, or disable the plugin")
        sound[view.name] = view
    return tuple(sound.values())
