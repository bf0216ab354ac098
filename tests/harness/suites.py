"""Determines which plugins each suite may use."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import importlib_metadata

from ci.workspace import KIT, Package, packages, with_dependencies
from titan_core.plugins.discovery import GROUP

PARALLEL = "harness_parallel"
"""The plugin of :mod:`harness.parallel`."""


def disabled_in(path: Path) -> tuple[str, ...]:
    """Return the plugins that are disabled for a test at ``path``: those of all packages except the tested one and its
    dependencies. Tests of several packages together (``tests/integration``) may use all."""
    everything = packages().values()
    tested = next((package for package in everything if path.is_relative_to(package.suite)), None)
    return (PARALLEL,) if tested is None else _disabled_beside(tested)


@cache
def _disabled_beside(tested: Package) -> tuple[str, ...]:
    wanted = {package.name for name in (tested.name, KIT) for package in with_dependencies(name)}
    # `python -m ci PACKAGE` installs only some of them, and a name that no plugin has is an error.
    installed = importlib_metadata.entry_points(group=GROUP).names
    disabled = [
        plugin
        for package in packages().values()
        if package.name not in wanted
        for plugin in package.plugins
        if plugin in installed
    ]
    return (*disabled, *((PARALLEL,) if tested.name == "titan-parallel" else ()))
