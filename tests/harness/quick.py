"""Tables of cases of which the quick loop runs a few, one of each kind: all others are marked ``full``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rows(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """A parameter for each of ``names``; those that are not in ``quick`` are marked ``full``.

    Raises:
        ValueError: ``quick`` has a name that is none of ``names``.
    """
    names = list(names)
    if unknown := set(quick) - set(names):
        raise ValueError(f"no such rows: {sorted(unknown)}")
    return [pytest.param(name, id=name, marks=[] if name in quick else [pytest.mark.full]) for name in names]
