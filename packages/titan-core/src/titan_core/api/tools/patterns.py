"""Name patterns: shell wildcards over fully qualified names, in which ``*`` also matches dots. Titan has no other kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import translate
from functools import lru_cache
from typing import Any


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` (``"layers.0.attention.wq"``) matches one of ``patterns`` (``"layers.*.wq"``)."""
    for pattern in patterns:  # noqa: SIM110 (a model of 100 blocks compares 100,000 pairs; a generator doubles the time)
        if _match_of(pattern)(name) is not None:
            return True
    return False


@lru_cache(maxsize=32768)
def _match_of(pattern: str) -> Callable[[str], Any]:
    return re.compile(translate(pattern)).match
