"""How a tensor is divided among the data files. All tensors of the same shape and sharding share a layout, so the manifest
does not grow by tensors times ranks. Does not import torch."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any

Runs = list[list[int]]
"""Integers as arithmetic runs ``[first, step, count]``: those of a regular sharding have few."""
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor in a data file."""

    file: int
    """Number of the file, which contains at most one piece of a tensor."""
    offset: tuple[int, ...]
    """Index, in the whole tensor, of the piece's first element."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A grid of pieces, which covers a tensor by its construction."""

    cuts: tuple[Sequence[int], ...]
    """For each dimension, where pieces begin, and its size."""
    files: Sequence[int]
    """The file of each piece, in row-major order."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(cuts[-1] for cuts in self.cuts)

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces."""
        return self._pieces([range(len(cuts) - 1) for cuts in self.cuts])

    def overlapping(self, offset: Sequence[int], shape: Sequence[int]) -> Iterator[Piece]:
        """Yield the pieces that have elements of a box. The time does not depend on the number of the others."""
        box = zip(self.cuts, offset, shape, strict=True)
        return self._pieces(
            [range(bisect_right(cuts, first) - 1, bisect_left(cuts, first + size)) for cuts, first, size in box]
        )

    def _pieces(self, places: Sequence[range]) -> Iterator[Piece]:
        for place in product(*places):
            number = 0
            for at, cuts in zip(place, self.cuts, strict=True):
                number = number * (len(cuts) - 1) + at
            box = [(cuts[at], cuts[at + 1] - cuts[at]) for at, cuts in zip(place, self.cuts, strict=True)]
            yield Piece(self.files[number], tuple(first for first, _ in box), tuple(size for _, size in box))

    def as_json(self) -> dict[str, Any]:
        """Return the layout as runs."""
        return {"cuts": [_runs(cuts) for cuts in self.cuts], "files": _runs(self.files)}


def layout_of(cuts_runs: Sequence[Runs], files_runs: Runs) -> Layout:
    """Return the layout that :meth:`Layout.as_json` represents.

    Raises:
        ValueError: it is no grid.
    """
    cuts, files = tuple(map(_expanded, cuts_runs)), _expanded(files_runs)
    for of_dim in cuts:
        whole = len(of_dim) == 2 and of_dim[1] == 0  # an empty dimension
        if len(of_dim) < 2 or of_dim[0] != 0 or not (whole or all(one < next_ for one, next_ in pairwise(of_dim))):
            raise ValueError("has a dimension that pieces do not cover once")
    if len(files) != prod(len(of_dim) - 1 for of_dim in cuts):
        raise ValueError("has another number of files than of pieces")
    if len(set(files)) != len(files):
        raise ValueError("has several pieces in a file")
    return Layout(cuts, files)


def number_of_pieces(cuts: Sequence[Runs], files: Runs) -> int:
    """Return the number of pieces of a layout in JSON, without expanding it.

    Raises:
        ValueError: a run has no values, or too large ones.
    """
    for first, step, count in (run for runs in (*cuts, files) for run in runs):
        if not (count > 0 and 0 <= first <= _LARGEST and 0 <= first + step * (count - 1) <= _LARGEST):
            raise ValueError("has a run [first, step, count] out of bounds")
    # More cuts than pieces belong to no grid. They count too, so that a limit on the pieces limits them.
    return max(sum(count for _, _, count in files), *(sum(count for _, _, count in of_dim) - 1 for of_dim in cuts), 0)


def _runs(values: Iterable[int]) -> Runs:
    found: Runs = []
    for value in values:
        if found:
            first, step, count = run = found[-1]
            if count == 1:
                run[1:] = value - first, 2
                continue
            if value == first + step * count:
                run[2] += 1
                continue
        found.append([value, 0, 1])
    return found


def _expanded(runs: Runs) -> Sequence[int]:
    found = array("q")
    for first, step, count in runs:
        found.extend(range(first, first + step * count, step) if step else [first] * count)
    return found
