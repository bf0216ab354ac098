"""Names that several plugins claim. Such a conflict concerns the jobs that use the name, and no other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from titan_core.api import Problem
from titan_core.plugins.discovery import Plugin

KEY = "config key"
"""Kind of the names of config keys (``section.key``)."""


@dataclass(frozen=True)
class Conflict:
    """A name that two plugins claim."""

    kind: str
    """``plugin``, the kind of a component, or :data:`KEY`."""
    name: str
    problem: Problem

    def __str__(self) -> str:
        return f"conflict: {self.problem}"


def conflicts_of(plugins: Iterable[Plugin]) -> list[Conflict]:
    """Return the names of plugins, of components and of config keys that several of ``plugins`` claim.

    The keys of the core are not among them: discovery refuses a plugin that claims one.
    """
    found: list[Conflict] = []
    owners: dict[tuple[str, str], tuple[object, Plugin]] = {}

    def claim(kind: str, name: str, claimant: object, plugin: Plugin) -> None:
        first, owner = owners.setdefault((kind, name), (claimant, plugin))
        if first is not claimant:
            found.append(Conflict(kind, name, _problem(f"{kind} {name if kind == KEY else repr(name)}", owner, plugin)))

    for plugin in plugins:
        claim("plugin", plugin.name, plugin, plugin)
        for component in plugin.components:
            claim(component.kind, component.name, component, plugin)
            for slot in component.reads:
                claim("slot", slot.name, plugin, plugin)
        sections = [component.config for component in plugin.components if component.config is not None]
        for section in dict.fromkeys(sections):
            for key in section.model_fields:
                claim(KEY, f"{section.section}.{key}", section, plugin)
    return found


def _problem(where: str, first: Plugin, second: Plugin) -> Problem:
    owner = f"{first.distribution} {first.version}"
    other = f"{second.distribution} {second.version}"
    fix = "uninstall one of them"
    if first.name != second.name:
        fix = f'switch one of them off ([plugins] disable = ["{second.name}"])'
    return Problem(where, f"claimed by both {owner} and {other}", fix)
