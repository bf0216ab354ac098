"""Marks tests that the quick run leaves to the full one: rows of tables beside the few that show each kind (``full``, or, in
large tables that name the rows of the full run too, ``long``), and those of ``tests/slow.txt`` (``full`` and ``slow``).

Each test marked ``full`` is in one of twelve parts too, which ``-m "part(number=3)"`` selects: pytest-split divides only all
selected tests, and a second run for them would collect everything twice.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).parents[1] / "slow.txt"
"""Tests that take more than half a second, except the fastest of each file."""
PARTS = 12


def mark_other_rows(items: Iterable[pytest.Item]) -> None:
    """Of each test marked ``quick_rows(number)``, mark all rows ``full`` but ``number`` that are spread over those that the
    quick run would have."""
    tables: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        left = item.get_closest_marker("full") or item.get_closest_marker("long")
        if not left and item.get_closest_marker("quick_rows"):
            tables[item.nodeid.partition("[")[0]].append(item)
    for table in tables.values():
        (number,) = next(table[0].iter_markers("quick_rows")).args
        quick = {round(index * (len(table) - 1) / max(1, number - 1)) for index in range(number)}
        for index, item in enumerate(table):
            if index not in quick:
                item.add_marker("full")


def mark_slow(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Mark the listed tests ``full`` and ``slow``.

    Raises:
        pytest.UsageError: a listed test does not exist, as far as that is known: its file was collected whole, or is gone.
    """
    listed = set(LIST.read_text().splitlines())
    names = {item.nodeid: item for item in items}
    for name in listed & names.keys():
        names[name].add_marker("full")
        names[name].add_marker("slow")
    if any("::" in argument for argument in config.args):
        return  # only some tests of a file have been collected
    files = {name.partition("::")[0] for name in names}

    def is_known(name: str) -> bool:
        file = name.partition("::")[0]
        return file not in files and (config.rootpath / file).exists()

    if gone := sorted(name for name in listed - names.keys() if not is_known(name)):
        raise pytest.UsageError(f"{LIST.name} lists {gone[0]!r}, which is no test: remove the line, or correct the name")


def mark_parts(items: Iterable[pytest.Item]) -> None:
    """Mark each test that is marked ``full`` with its part, which follows from its name."""
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.part(number=zlib.crc32(item.nodeid.encode()) % PARTS))


def rows(names: Iterable[str], quick: Collection[str], full: Collection[str] | None = None) -> list[Any]:
    """Return a parameter for each of ``names``, marked as :func:`quick_rows` does.

    Raises:
        ValueError: ``quick`` or ``full`` contains a name that is not in ``names``.
    """
    return quick_rows([pytest.param(name, id=name) for name in names], quick, full)


def quick_rows(cases: Iterable[Any], quick: Collection[str], full: Collection[str] | None = None) -> list[Any]:
    """Return ``cases``, made by :func:`pytest.param` with an id. Those whose id is not in ``quick`` are marked ``full``, or
    ``long`` if ``full`` is given and does not contain it.

    Raises:
        ValueError: ``quick`` or ``full`` contains an id that no case has.
    """
    cases = list(cases)
    if unknown := {*quick, *(full or ())} - {case.id for case in cases}:
        raise ValueError(f"no such rows: {sorted(unknown)}")

    def marks(name: str) -> list[pytest.MarkDecorator]:
        if name in quick:
            return []
        return [pytest.mark.full] if full is None or name in full else [pytest.mark.long]

    return [pytest.param(*case.values, id=case.id, marks=[*case.marks, *marks(case.id)]) for case in cases]
