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
    names = list(names)
    if unknown := set(quick) - set(names):
        raise ValueError(f"no such rows: {sorted(unknown)}")
    return [pytest.param(name, id=name, marks=[] if name in quick else [pytest.mark.full]) for name in names]
