"""Name patterns: shell wildcards over fully qualified names, in which ``*`` also matches dots. Titan has no other kind."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` (``"layers.0.attention.wq"``) matches one of ``patterns`` (``"layers.*.wq"``)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
