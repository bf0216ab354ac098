"""Costs of the blocks of one kind, from two traces of the real trainer. Free of torch.

A kind of block is what decides its operators: how its weights and sequences are divided, what is recomputed, the type of its
matmuls (:mod:`titan_simulate.plan.kinds`). What data parallelism adds is part of the traces; it is scaled to the groups of a
job, or left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from titan_simulate.engine.allocator import replay
from titan_simulate.engine.result import Owner
from titan_simulate.estimate.reserved import outside_bytes, workspaces_of
from titan_simulate.estimate.roofline import link_shares, seconds_of
from titan_simulate.estimate.tensor_overlap import overlap_tensor_parallel
from titan_simulate.estimate.timeline import simulate_streams
from titan_simulate.estimate.work import Kind, Work
from titan_simulate.hardware.machine import Machine
from titan_simulate.plan.traced_kind import HEAD, OTHERS, TracedKind

STATE = frozenset({Owner.PARAMETERS, Owner.GRADIENTS, Owner.OPTIMIZER})
"""Owners of what data parallelism shards."""
_KEPT = frozenset({Owner.ACTIVATIONS, Owner.OTHER})
"""Owners of what a block keeps for its backward pass."""

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

    def __init__(self, traced: TracedKind, machine: Machine) -> None:
        self._traced, self._machine = traced, machine
        self._one, self._two = traced.one, traced.two
        self.elements: Mapping[int, float] = traced.by_class(self._one.parts.elements[0])
        """Elements of parameters, before any division."""
        self._elements = sum(self._one.parts.elements[0].values())
        every = Counter([*traced.classes, OTHERS, HEAD])
        self._whole = sum(self.elements.get(place, 0.0) * count for place, count in every.items())
        self.outside = outside_bytes(self._one, machine)
        self.passes = cache(self._passes)
        self.transfers = cache(self._transfers)
        self.moments = cache(self._moments)
        self.unsharded = cache(self._unsharded)
        self.beside = cache(self._beside)
        self.kept = cache(self._kept)
        self.idle = cache(self._idle_of)
        expandable = machine.allocator.expandable_segments
        self._idle = [float(replay(sample.found.allocations.events, expandable).idle) for sample in (traced.one, traced.two)]
        self._trace = cache(self._trace_of)

    def _trace_of(self, batch: int) -> list[Work]:
        trace = self._traced.trace(batch)
        return overlap_tensor_parallel(trace, self._machine) if self._traced.overlaps else trace

    def _passes(self, batch: int, copies: bool = True, one_expert: bool = False) -> Passes:
        """Return the seconds of a microbatch of ``batch`` sequences, without the collectives of data parallelism.

        Args:
            copies: whether to count what it copies beside them.
            one_expert: whether to count experts as one product at full speed.
        """
        traced = self._traced
        trace = [
            replace(work, kind=Kind.WAIT) if traced.is_of_data_parallelism(work, copies) else work
            for work in self._trace(batch)
        ]  # fmt: skip
        if one_expert:
            trace = [traced.as_one_expert(work) for work in trace]
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
            unit = self._traced.unit(work.module)
            seconds[work.phase][unit] += delta
            exposed[work.group] += timeline.exposed.get(position, 0.0)
            if work.kind is Kind.COLLECTIVE:
                load = self._load(work, interval.end - interval.start)
                loads[work.phase][unit] = loads[work.phase].get(unit, Load()) + load
        once += max(0.0, timeline.seconds - now)
        forward, backward = (traced.by_class(seconds[phase]) for phase in ("forward", "backward"))
        of_class = {
            phase: {one: loads[phase].get(name, Load()) for one, name in traced.typical.items()} for phase in loads
        }  # fmt: skip
        return Passes(forward, backward, once, exposed, of_class)

    def _load(self, work: Work, seconds: float) -> Load:
        shares = link_shares(work, self._machine)
        return Load(seconds, seconds * shares.get("node", 0.0), seconds * shares.get("network, out", 0.0))

    def _transfers(self, data: DataParallel) -> Mapping[int, Transfers]:
        """Return the collectives of data parallelism by class of block, :data:`OTHERS` and :data:`HEAD`."""
        places = {**self._traced.typical, OTHERS: None, HEAD: None}
        found: dict[str, dict[int, Load]] = {name: dict.fromkeys(places, Load()) for name in _TRANSFERS}
        for work in self._one.trace:
            if work.kind is not Kind.COLLECTIVE or not self._traced.is_of_data_parallelism(work):
                continue
            place, unit = self._traced.place(work.module), self._traced.unit(work.module)
            if place >= 0 and unit != self._traced.typical[place]:
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
        return sum(self.elements.get(one, 0.0) * count for one, count in blocks.items()) / self._elements / float(scale)

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
            early = name.startswith(("forward", "backward last block")) or self._traced.place(place) == HEAD
            kept = _KEPT | {Owner.COMMUNICATION} if early else _KEPT
            for label in {*one, *two}:
                owner, module, *_ = label
                further = min(1, batch - 1) if owner is Owner.LOSS and self._traced.chunked else batch - 1
                size = max(0.0, one.get(label, 0) + (two.get(label, 0) - one.get(label, 0)) * further)
                if owner in STATE:
                    state += size
                    gradients += size if owner is Owner.GRADIENTS else 0.0
                    continue
                fixed += size
                unit = self._traced.unit(module)
                if unit in self._traced.typical.values() and owner in kept:
                    own[self._traced.class_of[unit]] += size
                head += size if owner is Owner.LOSS or self._traced.place(module) == HEAD else 0.0
            found.append(Moment(state, gradients, fixed, own, head))
        return tuple(found)

    def _kept(self, batch: int) -> Mapping[int, float]:
        """Return the bytes of activations that a block keeps of a microbatch for backward, by class."""
        moments, typical = self.moments(batch), self._traced.typical
        return {one: max((moment.of_blocks.get(one, 0.0) for moment in moments), default=0.0) for one in typical}

    def state_of_model(self) -> float:
        """Return the bytes of parameters and optimizer state of the whole model, on all ranks together."""
        least = min(moment.state - moment.gradients for moment in self.moments(1))
        return least * self._traced.ranks * self._whole / self._elements

    def _beside(self, batch: int, blocks: Sequence[tuple[int, int]]) -> tuple[tuple[Moment, float], ...]:
        """Return for each moment what a rank uses beside its state, of one microbatch of ``batch`` sequences.

        Args:
            blocks: numbers by class, and 1 for :data:`OTHERS` and :data:`HEAD` if it has them.
        """
        further = Counter(dict(blocks))
        further.subtract(Counter(self._traced.class_of.values()))
        has_head = any(one == HEAD for one, _ in blocks)
        return tuple(
            (
                moment,
                moment.fixed - (0.0 if has_head else moment.head)
                + sum(moment.of_blocks.get(one, 0.0) * count for one, count in further.items() if one >= 0),
            )
            for moment in self.moments(batch)
        )  # fmt: skip

    def _idle_of(self, batch: int) -> float:
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
            if "reduce" in work.name and self._traced.is_of_data_parallelism(work) and work.kind is Kind.COLLECTIVE:
                sizes[self._traced.unit(work.module)] += work.bytes
        return self._traced.by_class(sizes)


@cache
def _extended(ranks: tuple[int, ...], scale: Fraction) -> tuple[int, ...]:
    """Return a group that is ``scale`` times as large, with the same distance between neighbours."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return tuple(ranks[0] + stride * number for number in range(max(1, int(len(ranks) * scale))))
