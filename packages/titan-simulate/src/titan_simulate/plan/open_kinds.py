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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from titan_core.api import MeshPlan
from titan_simulate.plan.kinds import Kind

_RIDGE = 1e-4
"""Of the fit: where the traced kinds leave a factor open, it is near 1."""
_UNKNOWN = 0.8
"""Factor of a choice, or of a division of experts, that no traced kind has."""


class KnowsTraced(Protocol):
    """Of :class:`titan_simulate.plan.compose.Composes`, what bounds other kinds."""

    def seconds(self, kind: Kind, batch: int, one_expert: bool = False) -> float:
        """Return the least time of a sequence on the ranks of a traced kind."""
        ...

    def filled(self, kind: Kind, proved: bool = True) -> float:
        """Return the activations of a sequence that a rank of a traced kind keeps, by the memory that it has for them."""
        ...


@dataclass(frozen=True)
class Rules:
    """How the blocks of kinds are related."""

    divided: Collection[str]
    """Degree keys of the dimensions that divide a block."""
    weights: Collection[str]
    """Those of the dimensions that divide its weights."""
    exchanged: Collection[str]
    """Those of views along which ranks only exchange activations."""
    experts: Collection[str]
    """Those of views that divide experts."""
    faster_first: Mapping[str, Sequence[Any]]
    """Config key -> values of which each later one adds work."""


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
    def _table(self) -> _Table:
        return _Table([*self._open, *(kind for kind, _, _ in self._traced)], self._rules)


class _Table:
    """Kinds as rows of numbers: plans of models with experts have tens of thousands of them."""

    def __init__(self, kinds: Sequence[Kind], rules: Rules) -> None:
        self._kinds, self._rules = kinds, rules
        self._row = {kind: number for number, kind in enumerate(kinds)}
        self._keys = sorted({key for kind in kinds for key, _ in kind.degrees})
        self._choices = sorted({key for kind in kinds for key, _ in kind.chosen})
        values: dict[str, list[Any]] = {key: list(rules.faster_first.get(key, ())) for key in self._choices}
        self._degrees = np.array([[dict(kind.degrees).get(key, 1) for key in self._keys] for kind in kinds])
        self._chosen = np.full((len(kinds), len(self._choices)), -1)
        for row, kind in enumerate(kinds):
            for key, value in kind.chosen:
                if value not in values[key]:
                    values[key].append(value)
                self._chosen[row, self._choices.index(key)] = values[key].index(value)

    def related(self, kind: Kind) -> Iterator[tuple[Kind, str]]:
        """Yield the kinds that ``kind`` bounds, and why: "same" blocks, divided further; "slower" choices; or divided
        "experts"."""
        row, rules = self._row[kind], self._rules
        found = np.ones(len(self._kinds), bool)
        experts, slower = np.zeros_like(found), np.zeros_like(found)
        for key, column in zip(self._keys, self._degrees.T, strict=True):
            own = column[row]
            if key in rules.divided or key in rules.exchanged:
                found &= column % own == 0
            elif key in rules.experts and own == 1:
                experts |= column > 1
            else:
                found &= column == own
        for key, column in zip(self._choices, self._chosen.T, strict=True):
            own = column[row]
            if own >= 0 and key in rules.faster_first:
                found &= column >= own
                slower |= column > own
            elif own >= 0:
                found &= column == own
        for number in map(int, np.flatnonzero(found)):
            yield self._kinds[number], "experts" if experts[number] else "slower" if slower[number] else "same"

    def fitted(self, traced: Sequence[Kind], values: Sequence[float]) -> dict[Kind, float]:
        """Return the expected values of all kinds, from those of the kinds that were traced. Of what none of these has:

        * A degree is like the largest smaller one that divides it, but for experts, of which nothing follows.
        * What ranks that exchange activations otherwise gain is at most what the division of blocks costs.
        * A choice that may be faster gains what is worth a trace (:data:`_UNKNOWN`).
        """
        features, places, choices = self._features
        rows = [self._row[kind] for kind in traced]
        known: NDArray[np.bool_] = np.any(features[rows], axis=0)
        effective, gained = features.copy(), np.zeros(len(self._kinds))
        divided = np.array([column for (key, _), column in places.items() if key in self._rules.divided], int)
        for (key, degree), column in places.items():
            smaller = [less for (other, less) in places if other == key and degree % less == 0 and known[places[key, less]]]
            if known[column]:
                continue
            if key in self._rules.experts:
                gained += features[:, column]
            elif smaller:
                effective[:, places[key, max(smaller)]] |= features[:, column]
            elif key in self._rules.exchanged:
                effective[np.ix_(np.flatnonzero(features[:, column]), divided)] = False
        for column, key in choices.items():
            if not known[column] and key not in self._rules.faster_first:
                gained += features[:, column]
        matrix = np.hstack([np.ones((len(rows), 1)), features[rows][:, known]])
        logarithms = np.log(np.maximum(values, 1e-12))
        mean = logarithms.mean()
        weights = np.linalg.solve(matrix.T @ matrix + _RIDGE * np.eye(matrix.shape[1]), matrix.T @ (logarithms - mean))
        found = np.exp(mean + weights[0] + effective[:, known] @ weights[1:] + math.log(_UNKNOWN) * gained)
        return dict(zip(self._kinds, map(float, found), strict=True))

    @cached_property
    def _features(self) -> tuple[NDArray[np.bool_], dict[tuple[str, int], int], dict[int, str]]:
        """Kinds by degrees and choices, as a table of truths; degree -> its column; and column of a choice -> its key."""
        columns: list[NDArray[np.bool_]] = []
        places: dict[tuple[str, int], int] = {}
        for key, column in zip(self._keys, self._degrees.T, strict=True):
            for value in np.unique(column[column > 1]):
                places[key, int(value)] = len(columns)
                columns.append(column == value)
        choices: dict[int, str] = {}
        for key, column in zip(self._choices, self._chosen.T, strict=True):
            for value in np.unique(column[column >= 0]):
                choices[len(columns)] = key
                columns.append(column == value)
        columns.append(np.array([not kind.sharded for kind in self._kinds]))
        return np.array(columns).T, places, choices
