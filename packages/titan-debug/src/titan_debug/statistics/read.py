"""Statistics read back, those of all ranks together. Free of torch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_core.api.errors import UserError
from titan_debug.statistics.moments import Moments
from titan_runs.record_checks import checked_records
from titan_runs.tail import Tail

RANK_FILE = "rank-{}.jsonl"


@dataclass(frozen=True)
class StepStatistics:
    """Of one step, over all ranks."""

    outputs: dict[str, Moments]
    """By module, in the order in which hidden states pass through them."""
    gradients: dict[str, Moments]
    """By parameter, in the model's order."""


def read_statistics(folder: Path) -> dict[int, StepStatistics]:
    """By step, what the ranks of a run have written to ``folder``. A step that was taken twice, since the run was resumed
    from before it, counts as it was taken last.

    Raises:
        UserError: nothing is there, or a file is damaged.
    """
    named = ((re.fullmatch(RANK_FILE.format(r"(\d+)"), file.name), file) for file in folder.glob(RANK_FILE.format("*")))
    files = sorted((int(found[1]), file) for found, file in named if found)
    by_step: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for _, file in files:
        for record in checked_records(file, _flaw):
            by_step[record["step"]].append(record)
    if not by_step:
        why = f"no statistics are in {str(folder)!r}"
        raise UserError.one(
            "statistics",
            why,
            "train with numerics.statistics_freq = 1 (or every so many steps), or ask a running job with --now",
        )
    return {step: _together(records) for step, records in sorted(by_step.items())}


class AddedStatistics:
    """What the ranks of a run write from now on, until there is a step that all of them have written."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._tails = [Tail(folder / RANK_FILE.format(rank), _flaw) for rank in range(world_size)]
        self._added: list[list[dict[str, Any]]] = [[] for _ in self._tails]
        for tail in self._tails:
            tail.read()  # what was there before

    def missing(self) -> list[int]:
        """The ranks that have not written yet; of a step that all have, none.

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
        """The first step that all ranks have written."""
        attempt, step = min(self._common())
        of_step = (one for records in self._added for one in records if (one["attempt"], one["step"]) == (attempt, step))
        return {step: _together(list(of_step))}

    def _common(self) -> set[tuple[float, int]]:
        """Attempt and step of what all ranks have written."""
        return set.intersection(*({(one["attempt"], one["step"]) for one in records} for records in self._added))


def _flaw(record: Mapping[str, Any]) -> str | None:
    """What is wrong with a line, in words; ``None`` if nothing is."""
    if not isinstance(record.get("step"), int) or not isinstance(record.get("attempt"), float):
        return "it has no step, or no attempt"
    places = record.get("places")
    for kind in ("outputs", "gradients"):
        of_kind = record.get(kind)
        if not isinstance(places, dict) or not isinstance(of_kind, dict) or not of_kind.keys() <= places.keys():
            return f"it has no {kind}, or not their places in the model"
        for figures in of_kind.values():
            if not isinstance(figures, list) or len(figures) != 5 or not all(_is_figure(one) for one in figures):
                return f"one of its {kind} has other figures than statistics have"
    return None


def _is_figure(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _together(records: list[dict[str, Any]]) -> StepStatistics:
    """Of a step, over the ranks that took it last (an earlier attempt at it may have had more)."""
    last = max(record["attempt"] for record in records)
    records = [record for record in records if record["attempt"] == last]
    places = {name: tuple(place) for record in records for name, place in record["places"].items()}
    return StepStatistics(_combined(records, "outputs", places), _combined(records, "gradients", places))


def _combined(records: list[dict[str, Any]], kind: str, places: dict[str, tuple[int, ...]]) -> dict[str, Moments]:
    several: defaultdict[str, list[Moments]] = defaultdict(list)
    for record in records:
        for name, figures in record[kind].items():
            count, *sums, not_finite = figures
            total, squares, abs_max = (math.nan if one is None else float(one) for one in sums)
            several[name].append(Moments(count, total, squares, abs_max, not_finite))
    # Within a block the order is that of the calls; sorting keeps it.
    return {name: Moments.total(several[name]) for name in sorted(several, key=lambda name: places[name])}
