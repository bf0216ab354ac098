"""Name patterns, the one kind that Titan has: shell wildcards over a fully qualified name, ``*`` crossing dots."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` (``"layers.0.attention.wq"``) matches one of ``patterns`` (``"layers.*.wq"``)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
