"""Kinds of blocks that were not traced, and what the traced ones say of their time.

A *bound* is proved: no step of a job of the kind is shorter. It follows from a traced kind whose blocks do no more work:

* Ranks that divide a block take together no less time than fewer ranks do, because tiles, launches and latencies do not
  divide, and collectives are added.
* Later values of ``Planning.faster_first`` only add work.
* Ranks that divide experts multiply as many rows as each of them did before, and exchange them. They read fewer weights, so
  that this bound counts experts as one product at full speed (:meth:`titan_simulate.plan.compose.Composes.seconds`).

The time of ``n`` ranks for a sequence, by all ranks of the job, then bounds a step, whatever its pipeline, its data
parallelism and its microbatches do. An *expectation* orders the kinds: it multiplies factors of degrees and choices, which
are fitted to the traced kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from titan_core.api import MeshPlan
from titan_simulate.plan.kinds import Kind, Rules

if TYPE_CHECKING:
    from titan_simulate.plan.kind_table import KindTable


class KnowsTraced(Protocol):
    """Of :class:`titan_simulate.plan.compose.Composes`, what bounds other kinds."""

    def seconds(self, kind: Kind, batch: int, one_expert: bool = False) -> float:
        """Return the least time of a sequence on the ranks of a traced kind."""
        ...

    def filled(self, kind: Kind, proved: bool = True) -> float:
        """Return the activations of a sequence that a rank of a traced kind keeps, by the memory that it has for them."""
        ...


@dataclass
class OpenKind:
    """A kind that was not traced."""

    mesh: MeshPlan
    """A mesh that has it."""
    batch: int
    """Sequences of the largest microbatch that bounds count: larger ones take no less time for each sequence."""
    pipelined: bool = True
    """Whether some of its jobs divide the layers."""
    job: bool = True
    """Whether some job has it. If not, it only bounds others."""
    size: tuple[int, int] = (1, 1)
    """Ranks that divide a block and its experts, and along how many dimensions and views."""
    bound: float = 0.0
    ancestor: Kind | None = None
    """The traced kind whose blocks are those of this one, divided among fewer ranks, so that they bound its memory too."""
    of_ancestor: float = 0.0
    """The bound that follows from ``ancestor``."""
    filled: float = 0.0
    """Activations of a sequence that a rank keeps at least, by the memory that it has for them."""
    least: float | None = None
    """The bound of the jobs that fit, by ``ancestor``, if it is known."""
    guess: float | None = None
    """The shortest step of jobs that may fit, if their blocks were those of ``ancestor``, evenly divided."""


class Expected(NamedTuple):
    """What is expected of a kind that was not traced, in seconds of a step."""

    bound: float
    """What its bound will be once it is traced."""
    step: float
    """The same of a job that fits."""
    filled: float = 0.0
    """Activations of a sequence that a rank keeps, by the memory that it has for them."""

    def is_no_better(self, other: Expected) -> bool:
        """Whether a kind takes no less time and no less memory."""
        return self.bound >= other.bound and self.filled >= other.filled


def slowdown(filled: float, pipelined: bool, proved: bool = True) -> float:
    """Return a factor by which memory makes each step of a kind longer than computation does, infinity if no job fits.

    Without a pipeline, the activations of a sequence on all blocks must fit. With one, those of a block stay until its
    backward pass, hence at least as long as the blocks after it run forward and backward on that microbatch: on the mean of
    blocks, half of the time ``t`` of a microbatch on all of them. By Little's law, ``p`` ranks then fill ``filled x t / 2``
    of their memory-time for each microbatch, of ``p`` in each second. So a microbatch takes no less than ``t x filled / (2
    p)``, and by computation alone no less than ``t / p``.

    Args:
        filled: activations of a sequence on all blocks that a rank keeps, by the memory that it has for them.
        pipelined: whether some job of the kind divides the layers.
        proved: whether to count no more than what follows from that: a schedule that sends each microbatch through all
            stages before the first of them returns keeps twice as much on the first rank.
    """
    if filled <= 1.0:
        return 1.0
    return max(1.0, filled / 2 if proved else filled) if pipelined else math.inf


class OpenKinds:
    """The kinds of a search that were not traced."""

    def __init__(self, rules: Rules, composer: KnowsTraced, scale: float) -> None:
        """
        Args:
            scale: seconds of a step, by those of a sequence on one rank: sequences of a step for each rank.
        """
        self._rules, self._composer, self._scale = rules, composer, scale
        self._open: dict[Kind, OpenKind] = {}
        self._traced: list[tuple[Kind, float, float]] = []  # with ranks x seconds, and ranks x filled memory

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._open)

    def __contains__(self, kind: Kind) -> bool:
        return kind in self._open

    def __getitem__(self, kind: Kind) -> OpenKind:
        return self._open[kind]

    def add(self, kind: Kind, one: OpenKind) -> None:
        """Add a kind, unless it is known."""
        degrees = [degree for _, degree in kind.degrees if degree > 1]
        one.size = math.prod(degrees), len(degrees)
        self._open.setdefault(kind, one)
        self.__dict__.pop("_table", None)

    def pop(self, kind: Kind) -> OpenKind:
        """Return a kind that will be traced, and forget it."""
        return self._open.pop(kind)

    def one_of_each_choice(self) -> list[Kind]:
        """Return kinds that divide nothing: with the fastest choices, and with each other of ``faster_first``, which may
        take less memory."""
        first = {key: values[0] for key, values in self._rules.faster_first.items() if values}
        found: dict[object, Kind] = {}
        for kind in self._open:
            chosen = dict(kind.chosen)
            slower = tuple((key, value) for key, value in first.items() if key in chosen and chosen[key] != value)
            if all(degree == 1 for _, degree in kind.degrees) and kind.sharded and len(slower) <= 1:
                found.setdefault(tuple((key, chosen[key]) for key, _ in slower), kind)
        return sorted(found.values(), key=lambda kind: [chosen in first.items() for chosen in kind.chosen], reverse=True)

    def learn(self, kind: Kind, batch: int) -> None:
        """Bound the kinds whose blocks do no less work than those of ``kind``, which was traced.

        Args:
            batch: of the kind when it was open.
        """
        ranks = kind.ranks(self._rules.divided)
        self._traced.append((kind, ranks * self._composer.seconds(kind, batch), ranks * self._composer.filled(kind, False)))
        for other, relation in self._table.related(kind):
            one = self._open.get(other)
            if one is None:
                continue
            bound = ranks * self._scale * self._composer.seconds(kind, one.batch, relation == "experts")
            one.bound = max(one.bound, bound)
            if relation == "same" and bound > one.of_ancestor:
                one.ancestor, one.of_ancestor, one.least, one.guess = kind, bound, None, None
                one.filled = self._composer.filled(kind) * ranks / other.ranks(self._rules.divided)

    def bounds(self) -> dict[Kind, float]:
        """Return the proved bound of each kind, in seconds."""
        return {kind: one.bound for kind, one in self._open.items()}

    def expected(self) -> dict[Kind, Expected]:
        """Return what is expected of each kind."""
        if len(self._traced) < 2:
            return {kind: Expected(one.bound, one.bound) for kind, one in self._open.items()}
        names, times, sizes = zip(*self._traced, strict=True)
        seconds, kept = (self._table.fitted(names, values) for values in (times, sizes))
        found = {}
        for kind, one in self._open.items():
            bound = max(one.bound, self._scale * seconds[kind])
            filled = kept[kind] / kind.ranks(self._rules.divided)
            found[kind] = Expected(bound, bound * slowdown(filled, one.pipelined, proved=False), filled)
        return found

    @cached_property
    def _table(self) -> KindTable:
        from titan_simulate.plan.kind_table import KindTable  # which imports numpy

        return KindTable([*self._open, *(kind for kind, _, _ in self._traced)], self._rules)
