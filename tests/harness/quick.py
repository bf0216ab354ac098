"""Tables of cases of which the quick test run includes only a few, one of each kind. The others are marked ``full``, or, in
large tables that name the rows of the full run too, ``long``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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
