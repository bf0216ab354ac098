"""A kind of block, as two traces of the real trainer show it. Free of torch.

Traces of microbatches of one and of two sequences give the size of each operator for any number of sequences, because all of
them are affine in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import TYPE_CHECKING

from titan_core.api import matches
from titan_simulate.engine.names import is_grouped
from titan_simulate.estimate.block_classes import unit_of
from titan_simulate.estimate.fusion import fuse
from titan_simulate.estimate.work import Data, Kind, Work

if TYPE_CHECKING:
    from titan_simulate.estimate.traced_rank import TracedRank

OTHERS = -1
"""In place of a class of blocks: the embedding."""
HEAD = -2


@dataclass(frozen=True, kw_only=True)
class TracedKind:
    """Two traces, and what their job says of them."""

    one: TracedRank
    """With microbatches of one sequence."""
    two: TracedRank
    """With those of two."""
    classes: Sequence[int]
    """Class of each block of the model."""
    blocks: str
    """Name of the module whose children are the blocks."""
    head: Collection[str]
    """Names of the units of the head."""
    experts: Collection[str] = ()
    """Patterns of the modules that have experts."""
    data_groups: Callable[[Sequence[int]], bool]
    """Whether ranks share parameters that data parallelism shards or replicates."""
    overlaps: bool = False
    """Whether collectives run beside the matmuls that they belong to."""
    ranks: int
    """Of the traced job, which hold its parameters together once."""
    worst: Callable[[Sequence[Work]], list[Work]] = list
    """Returns the trace of the rank that the others wait for."""

    @cached_property
    def class_of(self) -> Mapping[str, int]:
        """Traced block -> its class."""
        return dict(zip(self.one.parts.kept[0], self.classes, strict=False))

    @cached_property
    def typical(self) -> Mapping[int, str]:
        """A block of each class, neither the first nor the last one of the trace if there is such a one."""
        kept = self.one.parts.kept[0]
        found = {self.class_of[name]: name for name in kept}
        return found | {self.class_of[name]: name for name in reversed(kept[1:-1])}

    def place(self, module: str) -> int:
        """Return the class of the block that ``module`` is in, or :data:`OTHERS`, or :data:`HEAD`."""
        unit = unit_of(module, self.blocks)
        if unit in self.class_of:
            return self.class_of[unit]
        return HEAD if any(f"{module}.".startswith(f"{one}.") for one in self.head) else OTHERS

    def unit(self, module: str) -> str:
        """Return the block that ``module`` is in, or ``module`` itself."""
        unit = unit_of(module, self.blocks)
        return unit if unit in self.class_of else module

    def by_class(self, sizes: Mapping[str, float]) -> dict[int, float]:
        """Return the ``sizes`` of a block of each class, of the head, and of all else: what blocks have beyond their like is
        of the pass as a whole."""
        found: dict[int, float] = {one: sizes.get(name, 0.0) for one, name in self.typical.items()}
        found |= {OTHERS: 0.0, HEAD: 0.0}
        for unit, size in sizes.items():
            where = self.place(unit)
            if where >= 0:
                found[OTHERS] += size - found[where]
            else:
                found[where] += size
        return found

    def is_of_data_parallelism(self, work: Work, copies: bool = True) -> bool:
        """Whether data parallelism adds ``work`` to forward or backward.

        Args:
            copies: whether what it copies beside its collectives is the block's own.
        """
        if work.phase not in ("forward", "backward") or not work.module:
            return False
        if work.kind is Kind.COLLECTIVE:
            # What blocks exchange runs between their operators; data parallelism, beside them.
            return work.name.startswith("c10d::") and work.stream != self._stream and self.data_groups(work.ranks)
        return not copies and work.name.startswith("fsdp::")

    @cached_property
    def chunked(self) -> bool:
        """Whether the loss is computed in chunks, so that larger microbatches have more of them."""
        chunks = (work for work, other in self._aligned if other is None and _like(work) in self._known)
        return any(self.place(work.module) == HEAD for work in chunks)

    def trace(self, batch: int) -> list[Work]:
        """Return the operators of a microbatch of ``batch`` sequences."""
        found: list[Work] = []
        for work, other in self._aligned:
            if other is not None:
                found.append(_scaled(other, work, batch))
                continue
            # One more of the same, such as a chunk of the loss; or an operator that one sequence does not need.
            times = batch - 1 if _like(work) in self._known else batch / 2
            found.append(replace(work, times=times))
        return fuse(self.worst(found))

    def as_one_expert(self, work: Work) -> Work:
        """Return ``work``, or what remains of it if ranks divide the experts: products of all rows at full speed."""
        if not matches(work.module, self.experts) or work.kind is Kind.COLLECTIVE:
            return work
        if not is_grouped(work.name):
            return replace(work, kind=Kind.WAIT)
        groups, rows, inner, columns = work.sizes
        return replace(work, sizes=(1, groups * rows, inner, columns), reads=(), writes=())

    @cached_property
    def _stream(self) -> str:
        return next(work.stream for work in self.one.trace if work.kind is Kind.MATMUL)

    @cached_property
    def _aligned(self) -> list[tuple[Work, Work | None]]:
        return _aligned(self.one.trace, self.two.trace)

    @cached_property
    def _known(self) -> set[tuple[object, ...]]:
        return {_like(work) for work in self.one.trace}


def _aligned(few: Sequence[Work], more: Sequence[Work]) -> list[tuple[Work, Work | None]]:
    """Return the operators of ``more``, each with that of ``few`` that it is like, if any."""
    one, two = ([(work.name, work.phase, work.module) for work in trace] for trace in (few, more))
    if one == two:
        return list(zip(more, few, strict=True))
    found: list[tuple[Work, Work | None]] = []
    for tag, start, end, begin, stop in SequenceMatcher(None, one, two, autojunk=False).get_opcodes():
        if tag == "equal":
            found += zip(more[begin:stop], few[start:end], strict=True)
        else:
            found += ((work, None) for work in more[begin:stop])
    return found


def _like(work: Work) -> tuple[object, ...]:
    """Return what operators have in common that do the same on tensors of the same size."""
    return work.name, work.phase, work.module, work.sizes, work.bytes, work.flops, work.traffic


def _scaled(one: Work, two: Work, batch: int) -> Work:
    """Return an operator for ``batch`` sequences, from the one for one sequence and the one for two."""

    def at(few: int, more: int) -> int:
        return few + (more - few) * (batch - 1)

    def data(few: Sequence[Data], more: Sequence[Data]) -> tuple[Data, ...]:
        return tuple(Data(b.storage, at(a.bytes, b.bytes)) for a, b in zip(few, more, strict=False))

    batches, rows, inner, columns = (at(a, b) for a, b in zip(one.sizes, two.sizes, strict=True))
    # Positions and storages are those of the longer trace.
    return replace(
        two, reads=data(one.reads, two.reads), writes=data(one.writes, two.writes), flops=at(one.flops, two.flops),
        sizes=(batches, rows, inner, columns), bytes=at(one.bytes, two.bytes), launches=at(one.launches, two.launches),
    )  # fmt: skip
