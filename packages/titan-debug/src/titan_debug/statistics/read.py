"""Statistics read back, those of all ranks together. Free of torch."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_core.errors import UserError
from titan_core.metrics.json_lines import read_lines
from titan_debug.statistics.moments import Moments

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
    files = sorted(folder.glob(RANK_FILE.format("*")), key=lambda file: int(file.stem.removeprefix("rank-")))
    if not files:
        why = f"no statistics are in {str(folder)!r}"
        raise UserError.one(
            "statistics",
            why,
            "train with numerics.statistics_freq = 1 (or every so many steps), or ask a run that is going on, with --now",
        )
    by_step: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for file in files:
        for record in read_lines(file):
            by_step[record["step"]].append(record)
    return {step: _together(records) for step, records in sorted(by_step.items())}


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
