"""Pipeline schedules from CSV files in torch's format: one row per rank, one cell per time slot, each empty or
``<stage><F|B|I|W><microbatch>``. F is forward and B backward; I and W split B into gradients of inputs and of weights.
Imports no torch."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_core.api import Problem, UserError

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True)
class ScheduleTable:
    """The facts of a schedule file that the rest of the config must match."""

    ranks: int
    rank_of: tuple[int, ...]
    """Rank that holds each stage."""
    microbatches: int
    splits_backward: bool


def read_table(path: str, where: str) -> ScheduleTable:
    """Read a schedule file, and check that each stage is on one rank and runs each microbatch forward and backward.

    Raises:
        UserError: The file cannot be read, or is not a valid schedule; reports every mistake with its row.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8 text"
        raise UserError.one(where, f"cannot be read: {why}", "name a CSV file with one row per pipeline rank") from None
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    actions: dict[tuple[int, int], list[str]] = {}
    holder: dict[int, int] = {}
    problems: list[Problem] = []
    for rank, row in enumerate(rows):
        for slot, cell in enumerate(row, 1):
            if not cell:
                continue
            match = _CELL.fullmatch(cell)
            place = f"{where}: row {rank + 1}, cell {slot}"
            if match is None:
                fix = "write stage, then F, B, I or W, then microbatch, such as 0F3"
                problems.append(Problem(place, f"{cell!r} is not an action", fix))
                continue
            stage, action, microbatch = int(match[1]), match[2], int(match[3])
            if holder.setdefault(stage, rank) != rank:
                why = f"stage {stage} is already on rank {holder[stage]}"
                problems.append(Problem(place, why, "keep each stage on one rank"))
            actions.setdefault((stage, microbatch), []).append(action)
    if not problems:
        problems += [Problem(where, why, "complete the file") for why in _gaps(actions, holder)]
    if problems:
        raise UserError(*problems)
    return ScheduleTable(
        ranks=len(rows),
        rank_of=tuple(holder[stage] for stage in range(len(holder))),
        microbatches=1 + max(microbatch for _, microbatch in actions),
        splits_backward=any("I" in done for done in actions.values()),
    )


def _gaps(actions: dict[tuple[int, int], list[str]], holder: dict[int, int]) -> Iterator[str]:
    if not actions:
        yield "contains no action"
        return
    missing = sorted(set(range(max(holder) + 1)) - set(holder))
    if missing:
        yield f"has no stage {missing[0]}"
    for stage in sorted(holder):
        for microbatch in range(1 + max(microbatch for _, microbatch in actions)):
            done = "".join(actions.get((stage, microbatch), []))
            if done not in ("FB", "FIW"):
                yield (
                    f"stage {stage} runs {done or 'nothing'} for microbatch {microbatch}, "
                    "and must run F and then B, or F, I and W"
                )
