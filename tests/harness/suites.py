"""Which plugins each suite may see."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ci.workspace import CORE, packages

PARALLEL = "harness_parallel"
"""The plugin of :mod:`harness.parallel`."""


@cache
def disabled_in(path: Path) -> tuple[str, ...]:
    """The plugins that are switched off for a test at ``path``: those of all packages but the core and the one whose suite
    it is in. Tests of several packages together (``tests/integration``) see all."""
    everything = packages().values()
    mine = next((one for one in everything if path.is_relative_to(one.suite)), None)
    if mine is None:
        return (PARALLEL,)
    off = [plugin for one in everything if one.name not in (CORE, mine.name) for plugin in one.plugins]
    return (*off, *((PARALLEL,) if mine.name == "titan-parallel" else ()))
