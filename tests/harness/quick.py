"""Tables of cases of which the quick test run includes only a few, one of each kind. All others are marked ``full``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rows(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Return a parameter for each of ``names``. Those that are not in ``quick`` are marked ``full``.

    Raises:
        ValueError: ``quick`` contains a name that is not in ``names``.
    """
    return quick_rows([pytest.param(name, id=name) for name in names], quick)


def quick_rows(cases: Iterable[Any], quick: Collection[str]) -> list[Any]:
    """Return ``cases``, made by :func:`pytest.param` with an id. Those whose id is not in ``quick`` are marked ``full``.

    Raises:
        ValueError: ``quick`` contains an id that no case has.
    """
    cases = list(cases)
    if unknown := set(quick) - {case.id for case in cases}:
        raise ValueError(f"no such rows: {sorted(unknown)}")
    return [
        case if case.id in quick else pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.full])
        for case in cases
    ]
