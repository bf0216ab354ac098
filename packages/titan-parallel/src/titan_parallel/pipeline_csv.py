"""A pipeline schedule from a CSV file: a row a rank, a cell a time slot, each ``<stage><F|B|I|W><microbatch>`` or empty, as
torch writes them (F forward, B backward, or I and W: the gradients of inputs and of weights apart). Free of torch."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_core.api.errors import Problem, UserError

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True)
class ScheduleTable:
    """What a schedule file says of itself."""

    ranks: int
    rank_of: tuple[int, ...]
    """Of each stage, the rank that holds it."""
    microbatches: int
    splits_backward: bool


def read_table(path: str, where: str) -> ScheduleTable:
    """Read the file, and hold it against itself: each stage on one rank, each microbatch forward and backward on each.

    Raises:
        UserError: every mistake, with its row.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not text"
        raise UserError.one(where, f"cannot be read: {why}", "give a CSV file with a row for each pipeline rank") from None
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
                problems.append(
                    Problem(place, f"{cell!r} is no action", "write them like 0F3: stage, F B I or W, microbatch")
                )
                continue
            stage, action, microbatch = int(match[1]), match[2], int(match[3])
            if holder.setdefault(stage, rank) != rank:
                why = f"stage {stage} is on rank {holder[stage]} already"
                problems.append(Problem(place, why, "give each stage to one rank"))
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
        yield "it holds no action"
        return
    missing = sorted(set(range(max(holder) + 1)) - set(holder))
    if missing:
        yield f"it has no stage {missing[0]}"
    for stage in sorted(holder):
        for microbatch in range(1 + max(microbatch for _, microbatch in actions)):
            done = "".join(actions.get((stage, microbatch), []))
            if done not in ("FB", "FIW"):
                yield (
                    f"stage {stage} does {done or 'nothing'} with microbatch {microbatch}, "
                    "and each needs F and then B, or F, I and W"
                )
