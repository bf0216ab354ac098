"""How far estimates are from published runs, by kind of job and by trainer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.published.row import KEYS, Row

LONG = 32768
"""Positions of a sequence from which on a context is long."""


@dataclass(frozen=True)
class Compared:
    """A row and its estimate."""

    row: Row
    mesh: str
    ratio: float
    """Predicted / published tokens per second."""
    experts: bool

    @property
    def factor(self) -> float:
        """How far off the estimate is, in either direction: 1 is exact."""
        return max(self.ratio, 1 / self.ratio)

    @property
    def kinds(self) -> list[str]:
        """The kinds of job that this is, of which a job can be several."""
        dimensions = set(re.findall(r"(\w+)=", self.mesh))
        options = self.row.options
        found = {
            "dense, data parallel only": not self.experts and not {"tp", "pp", "cp"} & dimensions,
            "tensor parallel": "tp" in dimensions,
            "pipeline": "pp" in dimensions,
            "long context": "cp" in dimensions or int(options.get(KEYS["length"], 0)) >= LONG,
            "experts": self.experts,
            "float8": options.get(KEYS["float8"]) == "true",
        }
        return [kind for kind, is_it in found.items() if is_it]


def table_of_errors(compared: Sequence[Compared]) -> str:
    """Return a table of the ratios' distribution, in Markdown."""
    lines = [
        "| kind | rows | median ratio | median factor | 90th percentile | worst |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    kinds = list(dict.fromkeys(kind for one in compared for kind in one.kinds))
    trainers = list(dict.fromkeys(one.row.trainer.name for one in compared))
    lines += [_line(kind, [one for one in compared if kind in one.kinds]) for kind in kinds]
    lines += [_line(f"by {name}", [one for one in compared if one.row.trainer.name == name]) for name in trainers]
    return "\n".join([*lines, _line("all", compared)])


def _line(kind: str, compared: Sequence[Compared]) -> str:
    factors = sorted(one.factor for one in compared)
    worst = max(compared, key=lambda one: one.factor)
    ninetieth = factors[math.ceil(0.9 * len(factors)) - 1]
    ratio = median(one.ratio for one in compared)
    spread = f"{median(factors):.2f} | {ninetieth:.2f} | {worst.ratio:.2f} ({worst.row.name})"
    return f"| {kind} | {len(compared)} | {ratio:.2f} | {spread} |"
