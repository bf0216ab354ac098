"""Costs of the blocks of one kind, from two traces of the real trainer. Free of torch.

A kind of block is what decides its operators: how its weights and sequences are divided, what is recomputed, the type of its
matmuls (:mod:`titan_simulate.plan.kinds`). Traces of microbatches of one and of two sequences give the size of each operator
and of each allocation for any number of sequences, because all of them are affine in it. What data parallelism adds is part
of the traces; it is scaled to the groups of a job, or left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING

from titan_simulate.engine.allocator import replay
from titan_simulate.engine.result import Owner
from titan_simulate.estimate.fusion import fuse
from titan_simulate.estimate.reserved import outside_bytes, workspaces_of
from titan_simulate.estimate.roofline import link_shares, seconds_of
from titan_simulate.estimate.tensor_overlap import overlap_tensor_parallel
from titan_simulate.estimate.timeline import simulate_streams
from titan_simulate.estimate.work import Data, Kind, Work
from titan_simulate.hardware.machine import Machine

if TYPE_CHECKING:
    from titan_simulate.estimate.traced_rank import TracedRank

STATE = frozenset({Owner.PARAMETERS, Owner.GRADIENTS, Owner.OPTIMIZER})
"""Owners of what data parallelism shards."""
_KEPT = frozenset({Owner.ACTIVATIONS, Owner.OTHER})
"""Owners of what a block keeps for its backward pass."""
OTHERS = -1
"""In place of a class of blocks: the embedding."""
HEAD = -2


_TRANSFERS = ("forward", "backward", "reductions", "sums")


@dataclass(frozen=True)
class DataParallel:
    """How a job shards and replicates the parameters of a kind."""

    scale: Fraction
    """Ranks that shard parameters, by those of the trace."""
    replicas: tuple[int, ...]
    """The ranks that hold replicas of a shard."""


@dataclass(frozen=True)
class Load:
    """Communication of a block in one pass, in seconds."""

    seconds: float = 0.0
    node: float = 0.0
    """Of these, the share of the links within a node that it takes."""
    network: float = 0.0

    @staticmethod
    def together(loads: Iterable[Load]) -> Load:
        """Return what takes place on streams of its own each, which share links."""
        loads = list(loads)
        node, network = sum(one.node for one in loads), sum(one.network for one in loads)
        return Load(max(node, network, *(one.seconds for one in loads)), node, network)

    def __add__(self, other: Load) -> Load:
        return Load(self.seconds + other.seconds, self.node + other.node, self.network + other.network)

    def __mul__(self, factor: float) -> Load:
        return Load(self.seconds * factor, self.node * factor, self.network * factor)


@dataclass(frozen=True)
class Transfers:
    """The collectives of data parallelism for a block, or for embedding or head."""

    forward: Load
    """Gathers of parameters before forward."""
    backward: Load
    """Gathers before backward."""
    reductions: Load
    """Over the ranks that shard."""
    sums: Load
    """Over replicas."""


@dataclass(frozen=True)
class Passes:
    """Seconds of a microbatch, by class of block, :data:`OTHERS` and :data:`HEAD`."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]
    once: float
    """What a step does once, on the elements that the traced rank holds."""
    exposed: Mapping[str, float]
    """Seconds of collectives of the trace during which nothing computes, by group."""
    loads: Mapping[str, Mapping[int, Load]]
    """Phase -> communication that is not of data parallelism, by class."""


@dataclass(frozen=True)
class Moment:
    """What is in use at the peak of a moment of the trace, in bytes."""

    state: float
    """Of a step with one microbatch."""
    gradients: float
    """Of ``state``."""
    fixed: float
    """All but state and blocks' own."""
    of_blocks: Mapping[int, float]
    """By class: what a block that is neither the first nor the last one holds."""
    head: float
    """Of ``fixed``, what the head made."""


class KindCosts:
    """Costs of a kind on a machine."""

    def __init__(
        self,
        one: TracedRank,
        two: TracedRank,
        machine: Machine,
        classes: Sequence[int],
        head: Sequence[str],
        data_groups: Callable[[Sequence[int]], bool],
        overlaps: bool,
        ranks: int,
        worst: Callable[[Sequence[Work]], list[Work]] = list,
    ) -> None:
        """
        Args:
            one: with microbatches of one sequence.
            two: with those of two.
            classes: class of each block of the model.
            head: names of the units of the head.
            data_groups: whether ranks differ in nothing but the data that they see.
            overlaps: whether collectives run beside the matmuls that they belong to.
            ranks: of the traced job, which hold its parameters together once.
            worst: returns the trace of the rank that the others wait for.
        """
        self._one, self._two, self._machine = one, two, machine
        self._head, self._data_groups, self._overlaps, self._worst = tuple(head), data_groups, overlaps, worst
        self._kept = one.parts.kept[0]
        self._class_of = dict(zip(self._kept, classes, strict=False))
        self._stream = next(work.stream for work in one.trace if work.kind is Kind.MATMUL)
        self._aligned = _aligned(one.trace, two.trace)
        self._typical = _typical(self._kept, self._class_of)
        self._known = {_like(work) for work in one.trace}
        chunks = (work for work, other in self._aligned if other is None and _like(work) in self._known)
        self._chunked = any(self._place(work.module) == HEAD for work in chunks)
        """Whether the loss is computed in chunks, so that larger microbatches have more of them."""
        self.elements: Mapping[int, float] = _by_class(one.parts.elements[0], self._place, self._typical)
        """Elements of parameters, before any division."""
        self._traced = sum(one.parts.elements[0].values())
        every = Counter([*classes, OTHERS, HEAD])
        self._whole = sum(self.elements.get(place, 0.0) * count for place, count in every.items())
        self._ranks = ranks
        self.outside = outside_bytes(one, machine)
        self.passes = cache(self._passes)
        self.transfers = cache(self._transfers)
        self.moments = cache(self._moments)
        self.unsharded = cache(self._unsharded)
        expandable = machine.allocator.expandable_segments
        self._idle = [float(replay(sample.found.allocations.events, expandable).idle) for sample in (one, two)]
        self._scaled = cache(self._scaled_trace)

    def _place(self, module: str) -> int:
        """Return the class of the block that ``module`` is in, or :data:`OTHERS`, or :data:`HEAD`."""
        unit = ".".join(module.split(".")[:2])
        if unit in self._class_of:
            return self._class_of[unit]
        return HEAD if any(f"{module}.".startswith(f"{one}.") for one in self._head) else OTHERS

    def _scaled_trace(self, batch: int) -> list[Work]:
        trace: list[Work] = []
        known = self._known
        for work, other in self._aligned:
            if other is not None:
                trace.append(_scaled(other, work, batch))
                continue
            # One more of the same, such as a chunk of the loss; or an operator that one sequence does not need.
            times = batch - 1 if _like(work) in known else batch / 2
            trace.append(replace(work, times=times))
        trace = fuse(self._worst(trace))
        return overlap_tensor_parallel(trace, self._machine) if self._overlaps else trace

    def _passes(self, batch: int, copies: bool = True) -> Passes:
        """Return the seconds of a microbatch of ``batch`` sequences, without the collectives of data parallelism.

        Args:
            copies: whether to count what it copies beside them.
        """
        trace = [
            replace(work, kind=Kind.WAIT) if self._of_data_parallelism(work, copies) else work
            for work in self._scaled(batch)
        ]  # fmt: skip
        timeline = simulate_streams(trace, self._machine)
        seconds: dict[str, dict[str, float]] = {"forward": defaultdict(float), "backward": defaultdict(float)}
        loads: dict[str, dict[str, Load]] = {"forward": {}, "backward": {}}
        now = once = 0.0
        exposed: dict[str, float] = defaultdict(float)
        for position, (work, interval) in enumerate(zip(trace, timeline.intervals, strict=True)):
            delta, now = max(0.0, interval.end - now), max(now, interval.end)
            if work.phase not in seconds:
                once += delta
                continue
            unit = self._unit(work.module)
            seconds[work.phase][unit] += delta
            exposed[work.group] += timeline.exposed.get(position, 0.0)
            if work.kind is Kind.COLLECTIVE:
                load = self._load(work, interval.end - interval.start)
                loads[work.phase][unit] = loads[work.phase].get(unit, Load()) + load
        once += max(0.0, timeline.seconds - now)
        forward, backward = (_by_class(seconds[phase], self._place, self._typical) for phase in ("forward", "backward"))
        of_class = {phase: {one: loads[phase].get(name, Load()) for one, name in self._typical.items()} for phase in loads}
        return Passes(forward, backward, once, exposed, of_class)

    def _load(self, work: Work, seconds: float) -> Load:
        shares = link_shares(work, self._machine)
        return Load(seconds, seconds * shares.get("node", 0.0), seconds * shares.get("network, out", 0.0))

    def _unit(self, module: str) -> str:
        unit = ".".join(module.split(".")[:2])
        return unit if unit in self._class_of else module

    def _of_data_parallelism(self, work: Work, copies: bool) -> bool:
        if work.phase not in ("forward", "backward") or not work.module:
            return False
        if work.kind is Kind.COLLECTIVE:
            # What blocks exchange runs between their operators; data parallelism, beside them.
            return work.name.startswith("c10d::") and work.stream != self._stream and self._data_groups(work.ranks)
        return not copies and work.name.startswith("fsdp::")

    def _transfers(self, data: DataParallel) -> Mapping[int, Transfers]:
        """Return the collectives of data parallelism by class of block, :data:`OTHERS` and :data:`HEAD`."""
        places = {**self._typical, OTHERS: None, HEAD: None}
        found: dict[str, dict[int, Load]] = {name: dict.fromkeys(places, Load()) for name in _TRANSFERS}
        for work in self._one.trace:
            if work.kind is not Kind.COLLECTIVE or not self._of_data_parallelism(work, copies=True):
                continue
            place, unit = self._place(work.module), self._unit(work.module)
            if place >= 0 and unit != self._typical[place]:
                continue
            sums, reduces = "allreduce" in work.name, "reduce" in work.name
            own = replace(work, ranks=data.replicas if sums else _extended(work.ranks, data.scale))
            load = self._load(own, seconds_of(own, self._machine))
            found["sums" if sums else "reductions" if reduces else work.phase][place] += load
            if reduces and not sums and len(data.replicas) > 1:
                shard = work.bytes // len(own.ranks)
                summed = replace(work, name="c10d::allreduce_", bytes=shard, ranks=data.replicas)
                found["sums"][place] += self._load(summed, seconds_of(summed, self._machine))
        return {place: Transfers(**{name: found[name][place] for name in _TRANSFERS}) for place in places}

    def state_share(self, blocks: Mapping[int, float], scale: Fraction) -> float:
        """Return the elements that a rank of a job holds, by those that the traced rank holds.

        Args:
            blocks: number of the rank's blocks by class, and 1 for :data:`OTHERS` and :data:`HEAD` if it has them.
            scale: of :class:`DataParallel`.
        """
        return sum(self.elements.get(one, 0.0) * count for one, count in blocks.items()) / self._traced / float(scale)

    def _moments(self, batch: int) -> tuple[Moment, ...]:
        """Return what is in use at the peaks of a step with one microbatch."""
        found = []
        for name, one in self._one.peaks.items():
            two = self._two.peaks.get(name)
            if two is None or name == "start" or " middle block " in name:
                continue
            state = fixed = head = gradients = 0.0
            own: dict[int, float] = defaultdict(float)
            # Blocks keep what they have received for backward. Later, only data parallelism has something on its way.
            place = name.split()[1] if len(name.split()) == 2 else ""
            early = name.startswith(("forward", "backward last block")) or self._place(place) == HEAD
            kept = _KEPT | {Owner.COMMUNICATION} if early else _KEPT
            for label in {*one, *two}:
                owner, module, *_ = label
                further = min(1, batch - 1) if owner is Owner.LOSS and self._chunked else batch - 1
                size = max(0.0, one.get(label, 0) + (two.get(label, 0) - one.get(label, 0)) * further)
                if owner in STATE:
                    state += size
                    gradients += size if owner is Owner.GRADIENTS else 0.0
                    continue
                fixed += size
                unit = self._unit(module)
                if unit in self._typical.values() and owner in kept:
                    own[self._class_of[unit]] += size
                head += size if owner is Owner.LOSS or self._place(module) == HEAD else 0.0
            found.append(Moment(state, gradients, fixed, own, head))
        return tuple(found)

    def kept(self, batch: int) -> Mapping[int, float]:
        """Return the bytes of activations that a block keeps of a microbatch for backward, by class."""
        moments = self.moments(batch)
        return {one: max((moment.of_blocks.get(one, 0.0) for moment in moments), default=0.0) for one in self._typical}

    def state_of_model(self) -> float:
        """Return the bytes of parameters and optimizer state of the whole model, on all ranks together."""
        least = min(moment.state - moment.gradients for moment in self.moments(1))
        return least * self._ranks * self._whole / self._traced

    @property
    def traced_blocks(self) -> Counter[int]:
        """Number of blocks in the trace, by class."""
        return Counter(self._class_of.values())

    def idle(self, batch: int) -> float:
        """Return the bytes that the allocator of the traced rank reserves beyond those in use, and workspaces."""
        if not self._machine.allocator.caching:
            return 0.0
        one, two = self._idle
        return max(0.0, one + (two - one) * (batch - 1)) + sum(
            size for _, size, _ in workspaces_of(self._one.found.allocations, self._machine)
        )

    def _unsharded(self) -> Mapping[int, float]:
        """Return the bytes of gradients before data parallelism shards them, by class."""
        sizes: Counter[str] = Counter()
        for work in self._one.trace:
            if "reduce" in work.name and self._of_data_parallelism(work, copies=True) and work.kind is Kind.COLLECTIVE:
                sizes[self._unit(work.module)] += work.bytes
        return _by_class(sizes, self._place, self._typical)


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


def _typical(kept: Sequence[str], class_of: Mapping[str, int]) -> dict[int, str]:
    """Return a block of each class, neither the first nor the last one of the trace if there is such a one."""
    found = {class_of[name]: name for name in kept}
    return found | {class_of[name]: name for name in reversed(kept[1:-1])}


def _by_class(sizes: Mapping[str, float], place: Callable[[str], int], typical: Mapping[int, str]) -> dict[int, float]:
    """Return the ``sizes`` of a block of each class, of the head, and of all else: what blocks have beyond their like is
    of the pass as a whole."""
    found: dict[int, float] = {one: sizes.get(name, 0.0) for one, name in typical.items()}
    found |= {OTHERS: 0.0, HEAD: 0.0}
    for unit, size in sizes.items():
        where = place(unit)
        if where >= 0:
            found[OTHERS] += size - found[where]
        else:
            found[where] += size
    return found


def _scaled(one: Work, two: Work, batch: int) -> Work:
    """Return an operator for ``batch`` sequences, from the one for one sequence and the one for two."""

    def at(few: int, more: int) -> int:
        return few + (more - few) * (batch - 1)

    def data(few: Sequence[Data], more: Sequence[Data]) -> tuple[Data, ...]:
        return tuple(Data(a.storage, at(a.bytes, b.bytes)) for a, b in zip(few, more, strict=False))

    batches, rows, inner, columns = (at(a, b) for a, b in zip(one.sizes, two.sizes, strict=True))
    return replace(
        one, reads=data(one.reads, two.reads), writes=data(one.writes, two.writes), flops=at(one.flops, two.flops),
        sizes=(batches, rows, inner, columns), bytes=at(one.bytes, two.bytes), launches=at(one.launches, two.launches),
    )  # fmt: skip


@cache
def _extended(ranks: tuple[int, ...], scale: Fraction) -> tuple[int, ...]:
    """Return a group that is ``scale`` times as large, with the same distance between neighbours."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return tuple(ranks[0] + stride * number for number in range(max(1, int(len(ranks) * scale))))
