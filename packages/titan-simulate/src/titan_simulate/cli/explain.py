"""Prints the explanation of ``titan estimate --explain``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from titan_core.toolkit.text import print_table, say
from titan_simulate.estimate.spans import EXPOSED

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate
    from titan_simulate.estimate.explain import Explanation, TimeRow

SHOWN = 20
"""Largest number of rows of a table."""
LEAST = 0.005
"""Share of the whole below which a row is not shown by itself."""
WIDEST = 34
"""Characters of a module that are shown."""
Row = TypeVar("Row")


def print_explanation(found: Estimate, explanation: Explanation) -> None:
    """Print where the time and the memory of ``found`` come from: the largest rows, and the others together."""
    step = found.step_seconds
    say(f"where the time goes, on rank {explanation.rank}")
    for of in (lambda row: row.phase), (lambda row: row.kind):
        say(f"  {_shares(explanation.time, of, step)}")
    print()
    decimals = 1 if step >= 0.1 else 3

    def time(seconds: float) -> tuple[str, str]:
        return f"{1e3 * seconds:,.{decimals}f}", f"{seconds / step:.1%}"

    large, others = _divided(explanation.time, lambda row: row.seconds, step)
    rows = [(module_of(row.module), row.phase, kind_of(row), *time(row.seconds)) for row in large]
    rows += [(text, "", "", *time(seconds)) for text, seconds in (*others, ("step", step))]
    print_table(("module", "phase", "time of a step", "ms", "share"), rows)
    print()

    peak = found.peak_gib

    def size(gib: float) -> tuple[str, str]:
        return f"{gib:,.{2 if peak >= 10 else 3}f}", f"{gib / peak:.1%}"

    parts, others = _divided(explanation.memory, lambda row: row.gib, peak)
    table = [(module_of(part.module), part.owner, *size(part.gib)) for part in parts]
    table += [(text, "", *size(gib)) for text, gib in (*others, ("peak", peak))]
    print_table(("module", f"memory at the peak, on rank {found.rank}", "GiB", "share"), table)
    calls, others = _divided(explanation.collectives, lambda row: row.seconds, step)
    if calls:
        print()
        print_table(
            ("module", "collective", "group", "calls", "GiB", "ms", "exposed"),
            [
                (module_of(one.module), operator_of(one.operator), one.group, f"{one.calls:,.0f}", f"{one.gib:,.2f}",
                 time(one.seconds)[0], time(one.exposed_seconds)[0])
                for one in calls
            ]
            + [(text, "", "", "", "", time(seconds)[0], "") for text, seconds in others],
        )  # fmt: skip


def _shares(rows: Sequence[TimeRow], of: Callable[[TimeRow], str], step: float) -> str:
    sums: Counter[str] = Counter()
    for row in rows:
        sums[of(row)] += row.seconds  # type: ignore[assignment]  # typeshed: integers
    return ", ".join(f"{what} {seconds / step:.1%}" for what, seconds in sums.most_common() if seconds >= 0.0005 * step)


def _divided(
    rows: Sequence[Row], value: Callable[[Row], Any], whole: float
) -> tuple[Sequence[Row], list[tuple[str, float]]]:  # fmt: skip
    """Return the large ones of sorted ``rows``, and a row for all others, if there are some."""
    large = [row for row in rows[:SHOWN] if value(row) >= LEAST * whole]
    others = rows[len(large) :]
    return large, [(f"{len(others)} others", sum(map(value, others)))] if others else []


def module_of(name: str) -> str:
    """Return the name of a module, with dots for its beginning if it is long."""
    return name if len(name) <= WIDEST else f"...{name[3 - WIDEST :]}"


def kind_of(row: TimeRow) -> str:
    """Return the kind of work of a row in a few words."""
    return f"exposed {row.group}" if row.kind == EXPOSED else row.kind


def operator_of(name: str) -> str:
    """Return the name of a collective without those of its namespace."""
    return name.rpartition("::")[2].strip("_")
