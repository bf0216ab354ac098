"""Name patterns: shell wildcards over fully qualified names, in which ``*`` also matches dots. Titan has no other kind."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import lru_cache

# fnmatch keeps 256 patterns in Python 3.11, and a model of 100 blocks has more.
_matcher = lru_cache(maxsize=32768)(lambda pattern: re.compile(translate(pattern)).match)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` (``"layers.0.attention.wq"``) matches one of ``patterns`` (``"layers.*.wq"``)."""
    return any(_matcher(pattern)(name) for pattern in patterns)
