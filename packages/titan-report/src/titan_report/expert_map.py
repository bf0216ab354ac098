"""The heat map of how busy the experts of each block were in the last logged step of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from titan_core.toolkit.files import open_file
from titan_core.toolkit.json_lines import complete_lines, parsed
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.shown import finite

FILE = "debug/expert_rows.jsonl"
"""Lines ``{"step": 10, "rows": [[rows of each expert], ... by block]}``, in a run's directory."""
MOST_CELLS = 100_000
"""Larger maps, as no model has them, are not drawn."""


@dataclass(frozen=True)
class ExpertMap:
    """Rows of each expert, relative to the mean of its block."""

    run: int
    """Number of the run, from 0."""
    step: int
    blocks: tuple[int, ...]
    """Numbers of the blocks that have experts."""
    shares: tuple[tuple[float, ...], ...]
    """By block and expert; 1 if all experts of the block are equally busy."""


def expert_maps(runs: Sequence[RunLog]) -> list[ExpertMap]:
    """Return a map for each run that has one."""
    found = [_of_run(number, run) for number, run in enumerate(runs)]
    return [one for one in found if one is not None]


def _of_run(number: int, run: RunLog) -> ExpertMap | None:
    last: ExpertMap | None = None
    try:
        with open_file(run.path / FILE, inside=run.path) as file:
            for _, line in complete_lines(file):
                last = _of_record(number, parsed(line)) or last
    except OSError:
        return None  # most runs have no experts
    return last


def _of_record(number: int, record: dict[str, Any] | None) -> ExpertMap | None:
    """Return the map of a line; ``None`` if it is damaged."""
    step, rows = (record or {}).get("step"), (record or {}).get("rows")
    if not isinstance(step, int) or not isinstance(rows, list) or not all(isinstance(row, list) and row for row in rows):
        return None
    if any(len(one) != len(other) for one, other in pairwise(rows)) or sum(map(len, rows)) > MOST_CELLS:
        return None
    counts = [[finite(value) for value in row] for row in rows]
    if any(value is None or value < 0 for row in counts for value in row):
        return None
    known = [(block, [value or 0.0 for value in row]) for block, row in enumerate(counts) if any(row)]
    shares = tuple(tuple(value * len(row) / sum(row) for value in row) for _, row in known)
    return ExpertMap(number, step, tuple(block for block, _ in known), shares) if known else None
