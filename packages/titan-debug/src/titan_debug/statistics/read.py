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


@dataclass(frozen=True)
class StepStatistics:
    """Of one step, over all ranks."""

    outputs: dict[str, Moments]
    """By module, in the order in which they were called (the stages of a pipeline one after another)."""
    gradients: dict[str, Moments]
    """By parameter, in the model's order."""


def read_statistics(folder: Path) -> dict[int, StepStatistics]:
    """By step, what the ranks of a run have written to ``folder``. A step that was taken twice, since the run was resumed
    from before it, counts as it was taken last.

    Raises:
        UserError: nothing is there, or a file is damaged.
    """
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda file: int(file.stem.removeprefix("rank-")))
    if not files:
        why = f"no statistics are in {str(folder)!r}"
        raise UserError.one("statistics", why, "train with numerics.statistics_freq = 1 (or every so many steps)")
    by_step: defaultdict[int, dict[Path, dict[str, Any]]] = defaultdict(dict)
    for file in files:
        for record in read_lines(file):
            by_step[record["step"]][file] = record
    return {
        step: StepStatistics(_combined(records, "outputs"), _combined(records, "gradients"))
        for step, records in sorted(by_step.items())
    }


def _combined(records: dict[Path, dict[str, Any]], kind: str) -> dict[str, Moments]:
    several: defaultdict[str, list[Moments]] = defaultdict(list)
    for record in records.values():
        for name, figures in record[kind].items():
            count, *sums, not_finite = figures
            total, squares, abs_max = (math.nan if one is None else float(one) for one in sums)
            several[name].append(Moments(count, total, squares, abs_max, not_finite))
    return {name: Moments.total(ones) for name, ones in several.items()}
