"""Chooses names for runs that are shown together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the name of each folder, prefixed with as many parents as needed to make it unique. The folders must differ."""
    parts = [[part for part in folder.resolve().parts if part != folder.anchor] or ["/"] for folder in folders]
    taken = [1] * len(folders)
    while True:
        names = ["/".join(part[-count:]) for part, count in zip(parts, taken, strict=True)]
        counts = Counter(names)
        longer = [
            min(count + 1, len(part)) if counts[name] > 1 else count
            for part, count, name in zip(parts, taken, names, strict=True)
        ]
        if longer == taken:
            return names
        taken = longer
