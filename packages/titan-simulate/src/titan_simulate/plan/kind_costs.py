"""Costs of the blocks of one kind, from two traces of the real trainer. Free of torch.

A kind of block is what decides its operators: how its weights and sequences are divided, what is recomputed, the type of its
matmuls (:mod:`titan_simulate.plan.kinds`). What data parallelism adds is part of the traces; it is scaled to the groups of a
job, or left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from titan_simulate.engine.allocator import replay
from titan_simulate.engine.result import Owner
from titan_simulate.estimate.reserved import outside_bytes, workspaces_of
from titan_simulate.estimate.tensor_overlap import overlap_tensor_parallel
from titan_simulate.estimate.timeline import simulate_streams
from titan_simulate.estimate.work import Kind, Work
from titan_simulate.hardware.machine import Machine
from titan_simulate.plan.traced_kind import HEAD, OTHERS, TracedKind

STATE = frozenset({Owner.PARAMETERS, Owner.GRADIENTS, Owner.OPTIMIZER})
"""Owners of what data parallelism shards."""
_KEPT = frozenset({Owner.ACTIVATIONS, Owner.OTHER})
"""Owners of what a block keeps for its backward pass."""
REDUCTIONS = "reductions"
EVERYTHING = frozenset({"forward", "backward", REDUCTIONS})
"""Transfers of data parallelism: parameters that are gathered, by phase, and gradients that are reduced."""


@dataclass(frozen=True)
class DataParallel:
    """How a job shards and replicates the parameters of a kind."""

    scale: Fraction
    """Ranks that shard parameters, by those of the trace."""
    replicas: tuple[int, ...]
    """The ranks that hold replicas of a shard."""


@dataclass(frozen=True)
class Passes:
    """Seconds of a microbatch, by class of block, :data:`OTHERS` and :data:`HEAD`."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]
    once: float
    """What a step does once, on the elements that the traced rank holds."""
    exposed: Mapping[str, float]
    """Seconds of collectives of the trace during which nothing computes, by group."""


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
        self.moments = cache(self._moments)
        self.unsharded = cache(self._unsharded)
        self.beside = cache(self._beside)
        self.kept = cache(self._kept)
        self.idle = cache(self._idle_of)
        expandable = machine.allocator.expandable_segments
        self._idle = [float(replay(sample.found.allocations.events, expandable).idle) for sample in (traced.one, traced.two)]
        self._trace = cache(self._trace_of)
        self._has_replicas = any(
            "allreduce" in work.name and traced.is_of_data_parallelism(work) for work in traced.one.trace
        )

    def _trace_of(self, batch: int) -> list[Work]:
        trace = self._traced.trace(batch)
        return overlap_tensor_parallel(trace, self._machine) if self._traced.overlaps else trace

    def _passes(
        self, batch: int, data: DataParallel | None = None, transfers: Collection[str] = EVERYTHING, copies: bool = True,
        one_expert: bool = False,
    ) -> Passes:  # fmt: skip
        """Return the seconds of a microbatch of ``batch`` sequences.

        Args:
            data: how the job shards and replicates parameters; ``None``: without the collectives of data parallelism.
            transfers: those of :data:`EVERYTHING` that take place.
            copies: whether to count what data parallelism copies beside its collectives.
            one_expert: whether to count experts as one product at full speed.
        """
        traced = self._traced
        trace = self._trace(batch)
        if data is not None:
            trace = self._in_job(trace, data, transfers)
        else:
            trace = [
                replace(work, kind=Kind.WAIT) if traced.is_of_data_parallelism(work, copies) else work for work in trace
            ]
        if one_expert:
            trace = [traced.as_one_expert(work) for work in trace]
        timeline = simulate_streams(trace, self._machine)
        seconds: dict[str, dict[str, float]] = {"forward": defaultdict(float), "backward": defaultdict(float)}
        now = once = 0.0
        exposed: dict[str, float] = defaultdict(float)
        for position, (work, interval) in enumerate(zip(trace, timeline.intervals, strict=True)):
            delta, now = max(0.0, interval.end - now), max(now, interval.end)
            if work.phase in seconds:
                seconds[work.phase][traced.unit(work.module)] += delta
                exposed[work.group] += timeline.exposed.get(position, 0.0)
            else:
                once += delta
        once += max(0.0, timeline.seconds - now)
        forward, backward = (traced.by_class(seconds[phase]) for phase in ("forward", "backward"))
        return Passes(forward, backward, once, exposed)

    def _in_job(self, trace: Sequence[Work], data: DataParallel, transfers: Collection[str]) -> list[Work]:
        """Return ``trace`` with the collectives of data parallelism between the ranks of a job."""
        found: list[Work] = []
        moved: dict[int, int] = {}
        for position, work in enumerate(trace):
            new = replace(work, after=tuple(moved[one] for one in work.after)) if work.after else work
            moved[position] = len(found)
            if work.kind is not Kind.COLLECTIVE or not self._traced.is_of_data_parallelism(work):
                found.append(new)
            elif (REDUCTIONS if "reduce" in work.name else work.phase) not in transfers:
                found.append(replace(new, kind=Kind.WAIT))
            elif "allreduce" in work.name:
                found.append(replace(new, ranks=data.replicas))
            else:
                new = replace(new, ranks=_extended(work.ranks, data.scale))
                found.append(new)
                if "reduce" in work.name and len(data.replicas) > 1 and not self._has_replicas:
                    # Replicas sum their shards on a stream of their own, which the next reduction does not wait for.
                    sums = replace(new, name="c10d::allreduce_", bytes=work.bytes // len(new.ranks), ranks=data.replicas)
                    found.append(replace(sums, stream="replicas", group="replicas", after=(moved[position],)))
        return found

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
