"""Counts the memory that fake tensors would take, by phase and by owner.

A storage is counted from the operator that makes it until it is freed. Every change is logged, so the state at a peak is
known exactly although owners are found later (a tensor turns out to be optimizer state after it was made).
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import Tensor, UntypedStorage

from titan_simulate.engine.allocator import Event
from titan_simulate.engine.result import Allocation, AllocationTrace, Label, Owner, Peak, peak_of
from titan_simulate.engine.streams import current_stream
from titan_simulate.engine.tensors import storage_key

KEPT_ALLOCATIONS = 40
"""Number of kinds of allocation that a peak lists."""


class _Piece:
    """A storage, from birth to death."""

    __slots__ = (
        "alive",
        "belongs_to",
        "bytes",
        "dtype",
        "module",
        "number",
        "operator",
        "owner",
        "phase",
        "reference",
        "shape",
    )

    def __init__(self, operator: str, module: str, phase: str, tensor: Tensor, owner: Owner | None) -> None:
        self.bytes = 0
        self.number = 0
        """In the trace of allocations."""
        self.operator, self.module, self.phase, self.owner = operator, module, phase, owner
        self.belongs_to: str | None = None
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.alive = True
        self.reference: _Reference | None = None


class _Reference(weakref.ref[UntypedStorage]):
    """Knows the key of its storage when that is gone."""

    __slots__ = ("key",)
    key: int


@dataclass
class _Mark:
    """The highest level of a phase, as a position in the log."""

    bytes: int
    position: int
    operator: str
    module: str


class DeviceMemory:
    """The memory of one kind of device.

    Args:
        traced: whether to keep all allocations and frees.
    """

    def __init__(self, traced: bool = False) -> None:
        self.live = 0
        self._events: list[Event] | None = [] if traced else None
        self._moments: list[tuple[int, str]] = [(0, "start")]
        self._marks_of_observers: list[tuple[int, Any]] = []
        self._traced: list[_Piece] = []
        self._pieces: dict[int, _Piece] = {}
        self._log: list[tuple[_Piece, int]] = []
        self._marks: dict[str, _Mark] = {}
        self._ends: dict[str, int] = {}
        self._base: dict[_Piece, int] = {}  # what was alive when the log began
        self.phase = "start"
        self.most = 0

    def note(self, tensor: Tensor, operator: str, module: str, owner: Owner | None = None) -> None:
        """Count the storage of ``tensor``, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        piece = self._pieces.get(key)
        if piece is None:
            piece = _Piece(operator, module, self.phase, tensor, owner)
            self._pieces[key] = piece
            piece.reference = _Reference(storage, self._gone)
            piece.reference.key = key
        if piece.bytes != storage.nbytes():
            self._change(piece, storage.nbytes() - piece.bytes, operator, module)

    def resized(self, storage: UntypedStorage, operator: str, module: str) -> None:
        """Follow a storage that was resized, which no operator shows."""
        piece = self._pieces.get(storage_key(storage))
        if piece is not None and piece.bytes != storage.nbytes():
            self._change(piece, storage.nbytes() - piece.bytes, operator, module)

    def own(
        self, tensor: Tensor, owner: Owner, only_if: Iterable[Owner | None] | None = None, module: str | None = None
    ) -> None:  # fmt: skip
        """Set the owner of the storage of ``tensor``.

        Args:
            only_if: owners that may be replaced; ``None``: all.
            module: to which the tensor belongs; ``None``: the one that allocated it. Tensors of several modules in one
                storage belong to what contains them all.
        """
        piece = self._pieces.get(storage_key(tensor.untyped_storage()))
        if piece is not None and (only_if is None or piece.owner in only_if):
            piece.owner = owner
            if module is not None:
                piece.belongs_to = module if piece.belongs_to is None else _containing(module, piece.belongs_to)

    def enter(self, phase: str) -> None:
        """Begin a phase; it may be entered several times."""
        if phase == self.phase:
            return
        self._ends[self.phase] = self.live
        self.phase = phase
        if self._events is not None:
            self._moments.append((len(self._events), phase))
        self._mark("", "")

    def _mark(self, operator: str, module: str) -> None:
        mark = self._marks.get(self.phase)
        if mark is None or self.live > mark.bytes:
            self._marks[self.phase] = _Mark(self.live, len(self._log), operator, module)
        self.most = max(self.most, self.live)

    def _change(self, piece: _Piece, delta: int, operator: str, module: str) -> None:
        self._trace(piece, piece.bytes + delta)
        piece.bytes += delta
        self.live += delta
        self._log.append((piece, delta))
        if delta > 0:
            self._mark(operator, module)

    def _gone(self, reference: _Reference) -> None:
        piece = self._pieces.pop(reference.key, None)
        if piece is not None:
            self._trace(piece, 0)
            piece.alive = False
            self.live -= piece.bytes
            self._log.append((piece, -piece.bytes))
            piece.bytes = 0

    def _trace(self, piece: _Piece, size: int) -> None:
        """Add to the trace that ``piece`` will have ``size`` bytes. Its memory is then another."""
        if self._events is None:
            return
        if piece.bytes:
            self._events.append((piece.number, 0, 0))
        if size:
            self._traced.append(piece)
            piece.number = len(self._traced)
            self._events.append((piece.number, size, current_stream()))

    @property
    def trace(self) -> AllocationTrace:
        """All allocations and frees so far."""
        labels = tuple(map(_label, self._traced))
        return AllocationTrace(tuple(self._events or ()), tuple(self._moments), tuple(self._marks_of_observers), labels)

    def mark(self, mark: Any) -> None:
        """Add ``mark`` to the trace."""
        self._marks_of_observers.append((len(self._events or ()), mark))

    def resident(self) -> dict[Owner, int]:
        """Return the bytes in use now, by owner."""
        found: Counter[Owner] = Counter()
        for piece in self._pieces.values():
            found[_owner(piece)] += piece.bytes
        return dict(found)

    def finish(self) -> dict[str, tuple[Peak, int]]:
        """Return the peak, and the level at the end, of each phase since the last call; start over."""
        self._ends[self.phase] = self.live
        wanted: dict[int, list[str]] = defaultdict(list)
        for phase, mark in self._marks.items():
            wanted[mark.position].append(phase)
        sizes, peaks = dict(self._base), dict[str, Peak]()
        for position in range(len(self._log) + 1):
            for phase in wanted.get(position, ()):
                peaks[phase] = _peak(sizes, self._marks[phase])
            if position < len(self._log):
                piece, delta = self._log[position]
                sizes[piece] = sizes.get(piece, 0) + delta
        self._base = {piece: piece.bytes for piece in self._pieces.values()}
        found = {phase: (peaks[phase], self._ends.get(phase, self.live)) for phase in self._marks}
        self._log, self._marks, self._ends = [], {}, {}
        return found


def _owner(piece: _Piece) -> Owner:
    return piece.owner or Owner.OTHER


def _containing(module: str, other: str) -> str:
    """Return the name of the smallest module that contains both."""
    pairs = zip(module.split("."), other.split("."), strict=False)
    return ".".join(name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _label(piece: _Piece) -> Label:
    return _owner(piece), piece.module, piece.module if piece.belongs_to is None else piece.belongs_to


def _peak(sizes: dict[_Piece, int], mark: _Mark) -> Peak:
    labels: Counter[Label] = Counter()
    kinds: Counter[tuple[int, Owner, str, str, str, tuple[int, ...], str]] = Counter()
    for piece, size in sizes.items():
        if size:
            labels[_label(piece)] += size
            dtype = str(piece.dtype).removeprefix("torch.")
            kinds[size, _owner(piece), piece.operator, piece.module, piece.phase, piece.shape, dtype] += 1
    largest = sorted(kinds.items(), key=lambda item: -item[0][0] * item[1])
    biggest = max(kinds, default=None)
    listed = largest[:KEPT_ALLOCATIONS]
    if biggest is not None and all(kind != biggest for kind, _ in listed):
        listed.append((biggest, kinds[biggest]))
    allocations = tuple(Allocation(kind[0], count, *kind[1:]) for kind, count in listed)
    return peak_of(labels, mark.operator, mark.module, allocations)
