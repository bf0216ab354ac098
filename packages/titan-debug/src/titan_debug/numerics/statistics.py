"""The statistics of module outputs and gradients: reads those of a run, and combines them over ranks. Imports no torch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_core.api import UserError
from titan_core.toolkit.runs.record_checks import checked_records
from titan_core.toolkit.runs.tail import Tail

RANK_FILE = "rank-{}.jsonl"


@dataclass(frozen=True)
class Moments:
    """Sums over a tensor's elements. Elements replicated on several ranks count several times. That does not change the mean
    and the root mean square, so these are the same on any mesh."""

    count: int
    sum: float
    """Sum of the elements; NaN if an element is NaN."""
    square_sum: float
    """Sum of their squares."""
    abs_max: float
    """The largest absolute value."""
    not_finite: int
    """Number of elements that are NaN or infinite."""

    @property
    def mean(self) -> float:
        """Mean; NaN without elements."""
        return self.sum / self.count if self.count else math.nan

    @property
    def rms(self) -> float:
        """Root mean square; NaN without elements."""
        return math.sqrt(self.square_sum / self.count) if self.count else math.nan

    @classmethod
    def total(cls, several: Iterable[Moments]) -> Moments:
        """Return the moments of all tensors together."""
        parts = list(several)
        sums, square_sums = [part.sum for part in parts], [part.square_sum for part in parts]
        return cls(
            sum(part.count for part in parts),
            math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan,
            math.fsum(square_sums) if all(map(math.isfinite, square_sums)) else math.nan,
            max((part.abs_max for part in parts if not math.isnan(part.abs_max)), default=math.nan),
            sum(part.not_finite for part in parts),
        )


@dataclass(frozen=True)
class StepStatistics:
    """The statistics of one step over all ranks."""

    outputs: dict[str, Moments]
    """Keyed by module, in the order in which hidden states pass through the modules."""
    gradients: dict[str, Moments]
    """Keyed by parameter, in the model's order."""


def read_statistics(folder: Path) -> dict[int, StepStatistics]:
    """Return the statistics in ``folder`` by step. If a run repeated a step after resuming, the last repetition counts.

    Raises:
        UserError: ``folder`` contains no statistics, or a file is damaged.
    """
    named = ((re.fullmatch(RANK_FILE.format(r"(\d+)"), file.name), file) for file in folder.glob(RANK_FILE.format("*")))
    files = sorted((int(found[1]), file) for found, file in named if found)
    by_step: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for _, file in files:
        for record in checked_records(file, _flaw):
            by_step[record["step"]].append(record)
    if not by_step:
        fix = "train with numerics.statistics_freq = N, or run `titan statistics RUN --now` while the job is running"
        raise UserError.one(str(folder), "contains no statistics", fix)
    return {step: _step_statistics(records) for step, records in sorted(by_step.items())}


class AddedStatistics:
    """Follows the statistics that the ranks of a run write from now on, until all ranks have written the same step."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._tails = [Tail(folder / RANK_FILE.format(rank), _flaw) for rank in range(world_size)]
        self._added: list[list[dict[str, Any]]] = [[] for _ in self._tails]
        for tail in self._tails:
            tail.read_each(lambda record: None, lambda: None)  # skip existing records

    def missing(self) -> list[int]:
        """Return the ranks that lag behind; empty if all ranks have written the same step.

        Raises:
            UserError: a file cannot be read.
        """
        for tail, added in zip(self._tails, self._added, strict=True):
            added += tail.read()[1]
        if self._common():
            return []
        last = [records[-1]["step"] if records else -1 for records in self._added]
        return [rank for rank, step in enumerate(last) if step == min(last)]

    def steps(self) -> dict[int, StepStatistics]:
        """Return the statistics of the first step that all ranks have written."""
        attempt, step = min(self._common())
        added = (record for records in self._added for record in records)
        return {
            step: _step_statistics([record for record in added if (record["attempt"], record["step"]) == (attempt, step)])
        }

    def _common(self) -> set[tuple[float, int]]:
        """Return (attempt, step) of the records that all ranks have written."""
        return set.intersection(*({(record["attempt"], record["step"]) for record in records} for records in self._added))


def _flaw(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a record, or ``None``."""
    if not isinstance(record.get("step"), int) or not isinstance(record.get("attempt"), float):
        return "it lacks a valid 'step' or 'attempt'"
    places = record.get("places")
    for kind in ("outputs", "gradients"):
        of_kind = record.get(kind)
        if not isinstance(places, dict) or not isinstance(of_kind, dict) or not of_kind.keys() <= places.keys():
            return f"it lacks a valid {kind!r}, or the 'places' of its {kind}"
        for figures in of_kind.values():
            if not isinstance(figures, list) or len(figures) != 5 or not all(map(_is_figure, figures)):
                return f"an item of its {kind!r} is not a list of 5 numbers"
    return None


def _is_figure(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _step_statistics(records: list[dict[str, Any]]) -> StepStatistics:
    """Combine the records of a step over the ranks of its last attempt; earlier attempts may have had more ranks."""
    last = max(record["attempt"] for record in records)
    records = [record for record in records if record["attempt"] == last]
    places = {name: tuple(place) for record in records for name, place in record["places"].items()}
    return StepStatistics(_combined(records, "outputs", places), _combined(records, "gradients", places))


def _combined(records: list[dict[str, Any]], kind: str, places: dict[str, tuple[int, ...]]) -> dict[str, Moments]:
    several: defaultdict[str, list[Moments]] = defaultdict(list)
    for record in records:
        for name, figures in record[kind].items():
            count, *sums, not_finite = figures
            total, squares, abs_max = (math.nan if value is None else float(value) for value in sums)
            several[name].append(Moments(count, total, squares, abs_max, not_finite))
    # The sort is stable, so modules within a block stay in call order.
    return {name: Moments.total(several[name]) for name in sorted(several, key=lambda name: places[name])}
