"""Kinds as rows of numbers, of which plans of models with experts have tens of thousands: how they are related, and what is
expected of those that were not traced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_simulate.plan.kinds import Kind, Rules

_RIDGE = 1e-4
"""Of the fit: where the traced kinds leave a factor open, it is near 1."""
_UNKNOWN = 0.8
"""Factor of a choice, or of a division of experts, that no traced kind has."""


class KindTable:
    """The kinds of a search."""

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
