"""The pieces of a tensor and the rank that writes each of them, which every rank derives alike from the tensor's placement:
no rank collects the pieces of the others to plan a save."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.format.dtypes import dtype_name
from titan_ckpt.format.layout import Layout
from titan_core.toolkit.optimizers import global_offset

Numbers = NDArray[numpy.int64]
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Placed:
    """A tensor as all ranks of its mesh describe it."""

    dtype: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    """Of the mesh's dimensions; none for a tensor that is whole."""
    ranks: tuple[int, ...] = ()
    """Distance in rank between neighbours along each dimension of the mesh, or, if the mesh is not ``regular``, all ranks
    less the first one."""
    regular: bool = True
    splits: tuple[tuple[int, int] | None, ...] = ()
    """For each dimension of the mesh, the dimension of the tensor that it shards, and the split factor of a strided shard
    (else 0). ``None``: ranks along it have the same."""


@dataclass(frozen=True)
class Pieces:
    """Boxes that cover a tensor, each with the rank that writes it."""

    ranks: Numbers
    offsets: Numbers
    """Index of each box's first element: ``[box, dimension]``."""
    shapes: Numbers

    def of_rank(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return offset and shape of the piece that ``rank`` writes, if any: at most one."""
        found = numpy.flatnonzero(self.ranks == rank)
        return (tuple(self.offsets[found[0]].tolist()), tuple(self.shapes[found[0]].tolist())) if len(found) else None

    def layout(self, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor of this shape, in the ranks' files.

        Raises:
            RuntimeError: the pieces are no grid.
        """
        cuts, numbers = [], numpy.zeros(len(self.ranks), numpy.int64)
        for dim, size in enumerate(shape):
            begins, at = numpy.unique(self.offsets[:, dim], return_inverse=True)
            numbers = numbers * len(begins) + at.reshape(-1)
            cuts.append(array("q", [*begins.tolist(), size]))
        if len(self.ranks) != prod(len(of_dim) - 1 for of_dim in cuts) or len(numpy.unique(numbers)) != len(numbers):
            raise RuntimeError("a tensor is sharded into pieces that are not those of a grid")
        return Layout(tuple(cuts), array("q", self.ranks[numpy.argsort(numbers)].tolist()))


def described(tensors: Mapping[str, Tensor]) -> dict[str, Placed]:
    """Return how this rank holds its ``tensors``.

    Raises:
        RuntimeError: a shard is not where its placement says.
    """
    mesh_of = cache(_described_mesh)
    found = {}
    for name, tensor in tensors.items():
        placed = Placed(dtype_name(tensor.dtype), tuple(tensor.shape))
        if isinstance(tensor, DTensor):
            sizes, ranks, regular = mesh_of(tensor.device_mesh)
            placed = replace(placed, sizes=sizes, ranks=ranks, regular=regular, splits=tuple(map(_split, tensor.placements)))
            _require_own_box(name, tensor, placed)
        found[name] = placed
    return found


def _described_mesh(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    ranks = mesh.mesh.numpy().astype(numpy.int64)
    offsets = ranks - ranks.flat[0]
    steps = [int(offsets.take(1, axis=dim).flat[0]) if size > 1 else 0 for dim, size in enumerate(ranks.shape)]
    regular = numpy.array_equal(offsets, _at(ranks.shape, steps))
    return ranks.shape, tuple(steps if regular else offsets.reshape(-1).tolist()), regular


def _at(sizes: Sequence[int], steps: Sequence[int]) -> Numbers:
    total = numpy.zeros(tuple(sizes), numpy.int64)
    for dim, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        total += _along(numpy.arange(size) * step, dim, len(sizes))
    return total


def _along(values: Any, dim: int, dims: int) -> Numbers:
    """Return ``values`` as an array of ``dims`` dimensions that varies along ``dim`` alone."""
    found: Numbers = values.reshape([-1 if one == dim else 1 for one in range(dims)])
    return found


def _split(placement: Any) -> tuple[int, int] | None:
    if placement.is_replicate():
        return None
    return placement.dim, 0 if type(placement) is Shard else placement.split_factor


@cache
def _boxes(placed: Placed) -> tuple[Numbers, Numbers]:
    """Return offset and shape of the shard at each coordinate of the mesh: ``[*mesh, dimension]``."""
    offsets, shapes = [], []
    for dim, length in enumerate(placed.shape):
        order: list[int] = []
        for at in reversed([at for at, split in enumerate(placed.splits) if split is not None and split[0] == dim]):
            _, factor = placed.splits[at] or (0, 0)
            # A strided shard is cut after as many of the mesh's later dimensions as make its split factor.
            after = next(
                (n for n in range(len(order) + 1) if prod(placed.sizes[one] for one in order[:n]) == max(1, factor)), 0
            )
            order.insert(after, at)
        offset, shape = numpy.zeros(placed.sizes, numpy.int64), numpy.full(placed.sizes, length, numpy.int64)
        for at in order:
            cut = -(-shape // placed.sizes[at])
            begin = numpy.minimum(cut * _along(numpy.arange(placed.sizes[at]), at, len(placed.sizes)), shape)
            offset, shape = offset + begin, numpy.minimum(cut, shape - begin)
        offsets.append(offset)
        shapes.append(shape)
    empty = numpy.zeros((*placed.sizes, 0), numpy.int64)
    return (numpy.stack(offsets, -1), numpy.stack(shapes, -1)) if placed.shape else (empty, empty)


def _require_own_box(name: str, tensor: DTensor, placed: Placed) -> None:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    offset, shape = (tuple(array[tuple(coordinate)].tolist()) for array in _boxes(placed))
    if shape != tuple(tensor.to_local().shape) or (prod(shape) and offset != global_offset(tensor)):
        raise RuntimeError(f"{name} is a DTensor whose shard is not that of its placements {list(tensor.placements)}")


def planned(descriptions: Sequence[tuple[Mapping[str, Placed], Spans]]) -> dict[str, tuple[Placed, Pieces]]:
    """Return the pieces of all tensors, the same on every rank.

    Args:
        descriptions: what :func:`described` returns on the ranks of each span.

    Raises:
        RuntimeError: ranks describe a tensor with another dtype or shape.
    """
    holders: dict[str, dict[Placed, Spans]] = {}
    for description, spans in descriptions:
        for name, placed in description.items():
            holders.setdefault(name, {}).setdefault(placed, []).extend(spans)
    found = {}
    for name, of_name in holders.items():
        placed, spans = min(of_name.items(), key=lambda entry: min(entry[1]))
        if len({(other.dtype, other.shape) for other in of_name}) > 1:
            raise RuntimeError(f"{name} has another dtype or shape on another rank")
        found[name] = placed, _pieces(name, placed, spans)
    for cached in (_boxes, _whole, _sharded):
        cached.cache_clear()  # megabytes for each kind of tensor on thousands of ranks
    return found


def _pieces(name: str, placed: Placed, spans: Spans) -> Pieces:
    """Return the pieces. Of ranks that hold the same, the tensor's name decides which writes, so that all write about as
    much."""
    chance = zlib.crc32(name.encode())
    if not placed.sizes:
        return _whole(placed.shape, _nth(sorted(spans), chance))
    chosen: list[int] = []
    for size, split in zip(placed.sizes, placed.splits, strict=True):
        chosen.append(-1 if split is not None else chance % size)
        chance //= size if split is None else 1
    # The first of the meshes that hold it writes.
    return _sharded(replace(placed, dtype=""), min(spans)[0], tuple(chosen))


@cache
def _whole(shape: tuple[int, ...], rank: int) -> Pieces:
    box = numpy.array([shape], numpy.int64).reshape(1, -1)
    return Pieces(numpy.array([rank]), numpy.zeros_like(box), box)


@cache
def _sharded(placed: Placed, first: int, chosen: tuple[int, ...]) -> Pieces:
    """Return the pieces, the same object for tensors that are sharded alike.

    Args:
        first: the first rank of the mesh.
        chosen: for each dimension of the mesh, the replica that writes; -1 if the dimension shards the tensor.
    """
    ranks = first + (_at(placed.sizes, placed.ranks) if placed.regular else numpy.array(placed.ranks).reshape(placed.sizes))
    where = tuple(slice(None) if at < 0 else at for at in chosen)
    flat = numpy.atleast_1d(ranks[where]).reshape(-1)
    offsets, shapes = (found[where].reshape(len(flat), len(placed.shape)) for found in _boxes(placed))
    filled = (shapes > 0).all(axis=1)
    if not filled.any():
        return _whole(placed.shape, int(flat[0]))  # an empty tensor has one empty piece
    return Pieces(flat[filled], offsets[filled], shapes[filled])


def _nth(spans: Spans, number: int) -> int:
    number %= sum(stop - start for start, stop in spans)
    for start, stop in spans:
        if number < stop - start:
            break
        number -= stop - start
    return start + number
