"""The records of a run in bounded memory, however long the run is."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

KEPT = 2000
"""Records that are kept evenly spaced: all of up to twice as many, then every 2nd, 4th, ..."""
EXTREMES = ("loss", "loss_max", "grad_norm", "tokens_per_second", "step_seconds", "memory_peak_gib", "validation_loss")
"""Metrics whose smallest, largest and missing values are kept too, so that thinning hides no spike and no gap."""
_STRETCH = 4
"""Evenly spaced records in the stretch of which the extremes are kept."""
_RECENT = 1000


class Thinned:
    """Records in order. All are kept of a short run. Of a longer one, those that are evenly spaced are kept, the extremes of
    each stretch, and the last record."""

    def __init__(self, records: Iterable[dict[str, Any]] = ()) -> None:
        self.count = 0
        """Number of records added."""
        self.even: list[dict[str, Any]] = []
        """Every n-th record: a fair sample, for medians."""
        self.last: dict[str, Any] | None = None
        self._spacing = 1
        self._stretches: list[dict[tuple[str, str], tuple[int, dict[str, Any]]]] = []
        for record in records:
            self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        """Append a record."""
        number, self.count, self.last = self.count, self.count + 1, record
        if number % self._spacing == 0:
            if len(self.even) == 2 * KEPT:
                self._halve()
            if number % self._spacing == 0:
                self.even.append(record)
        stretch = number // (self._spacing * _STRETCH)
        if stretch == len(self._stretches):
            self._stretches.append({})
        _keep(self._stretches[stretch], number, record)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records that are kept, in order."""
        kept = {number * self._spacing: record for number, record in enumerate(self.even)}
        if self._spacing > 1:
            kept |= {number: record for stretch in self._stretches for number, record in stretch.values()}
        if self.last is not None:
            kept[self.count - 1] = self.last
        return [kept[number] for number in sorted(kept)]

    def _halve(self) -> None:
        self.even = self.even[::2]
        self._spacing *= 2
        pairs = itertools.zip_longest(self._stretches[::2], self._stretches[1::2], fillvalue=dict[Any, Any]())
        self._stretches = []
        for pair in pairs:
            merged: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}
            for number, record in sorted(
                {number: record for one in pair for number, record in one.values()}.items(), key=lambda item: item[0]
            ):
                _keep(merged, number, record)
            self._stretches.append(merged)


def _keep(extremes: dict[tuple[str, str], tuple[int, dict[str, Any]]], number: int, record: dict[str, Any]) -> None:
    """Enter a record in the ``extremes`` of its stretch, by metric and kind of extreme, where it belongs."""
    for key in EXTREMES:
        if key not in record:
            continue
        value = record[key]
        if not isinstance(value, int | float) or not math.isfinite(value):
            extremes.setdefault((key, "gap"), (number, record))
            continue
        low, high = extremes.get((key, "low")), extremes.get((key, "high"))
        if low is None or value < low[1][key]:
            extremes[key, "low"] = (number, record)
        if high is None or value > high[1][key]:
            extremes[key, "high"] = (number, record)


class SignsOfLife:
    """The times of a run's records, as far as they say when its attempts ended and at which pace it runs: the last of each
    attempt, and the latest ones."""

    def __init__(self, starts: Sequence[float] = ()) -> None:
        self._starts: list[float] = sorted(starts)
        self._last: dict[int, float] = {}
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, time: float) -> None:
        """Add the time of a record, in seconds since the epoch."""
        self._recent.append(time)
        attempt = bisect_right(self._starts, time)
        if time > self._last.get(attempt, -math.inf):
            self._last[attempt] = time

    def begin(self, starts: Sequence[float]) -> None:
        """Take note of the times of all starts so far. A new one may be older than the latest records."""
        if len(starts) == len(self._starts):
            return
        times = [*self._last.values(), *self._recent]
        self._starts, self._last, recent = sorted(starts), {}, list(self._recent)
        for time in times:
            self.add(time)
        self._recent = deque(recent, maxlen=_RECENT)

    @property
    def times(self) -> list[float]:
        """The times that are kept; all of a run with few records."""
        return [*self._last.values(), *self._recent] if len(self._recent) == _RECENT else list(self._recent)

    @property
    def newest(self) -> float | None:
        """The time of the record that was added last."""
        return self._recent[-1] if self._recent else None
