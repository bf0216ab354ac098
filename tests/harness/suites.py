"""Which plugins each suite may see."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ci.workspace import packages, with_dependencies

PARALLEL = "harness_parallel"
"""The plugin of :mod:`harness.parallel`."""


@cache
def disabled_in(path: Path) -> tuple[str, ...]:
    """The plugins that are switched off for a test at ``path``: those of all packages but the one whose suite it is
    in and what that declares. Tests of several packages together (``tests/integration``) see all."""
    everything = packages().values()
    mine = next((one for one in everything if path.is_relative_to(one.suite)), None)
    if mine is None:
        return (PARALLEL,)
    installed = {one.name for one in with_dependencies(mine.name)}
    off = [plugin for one in everything if one.name not in installed for plugin in one.plugins]
    return (*off, *((PARALLEL,) if mine.name == "titan-parallel" else ()))
