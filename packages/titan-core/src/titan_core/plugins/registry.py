"""The components of all discovered plugins, by kind and name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import TypeVar

from titan_core.api import Component, Problem, Section, UserError
from titan_core.api.config.sections import CORE_SECTIONS
from titan_core.plugins.discovery import CORE, REGISTRATION_HOOKS, Discovery, InstalledPlugin, Plugin, discover
from titan_core.plugins.guard import Origin
from titan_core.plugins.installing import how_to_install
from titan_core.plugins.providers import provider
from titan_core.toolkit.errors import nearest

C = TypeVar("C", bound=Component)

NO_PLUGIN = Origin(CORE, "titan-core", "?", removable=False)
"""Used in tests in which not even the core was discovered."""


@dataclass(frozen=True)
class Components:
    """All components of all plugins. A job's config selects among them by name."""

    found: Discovery

    @classmethod
    def from_installed(cls) -> Components:
        """Return the registry of all installed plugins."""
        return cls(discover())

    def without(self, names: Iterable[str]) -> Components:
        """Return this registry with the plugins ``names`` switched off.

        Raises:
            UserError: no plugin has one of the names, or several have it.
        """
        names = list(names)
        if not names:
            return self
        found = self.found
        installed: dict[str, InstalledPlugin] = {
            plugin.name: plugin for plugin in (*found.plugins, *found.broken, *found.disabled)
        }
        for name in names:
            if name not in installed:
                fix = nearest(name, list(installed))
                raise UserError.one(f"plugins.disable = {names}", f"no plugin is named {name!r}", fix)
            self.require_unclaimed("plugin", name)
        off = [plugin for plugin in installed.values() if plugin.name in names or plugin in found.disabled]
        return Components(
            Discovery(
                tuple(plugin for plugin in found.plugins if plugin.name not in names),
                tuple(broken for broken in found.broken if broken.name not in names),
                tuple(InstalledPlugin(plugin.name, plugin.distribution, plugin.version) for plugin in off),
            )
        )

    @cached_property
    def conflicts(self) -> list[Conflict]:
        """The names that several plugins claim."""
        return conflicts_of(self.found.plugins)

    def require_unclaimed(self, kind: str, name: str) -> None:
        """Check that at most one plugin claims ``name``, a name of :attr:`Conflict.kind` ``kind``.

        Raises:
            UserError: several plugins claim it. Names their distributions.
        """
        if problems := self.claims(kind, name):
            raise UserError(*problems)

    def claims(self, kind: str, name: str) -> list[Problem]:
        """Return the conflicts about a name, for a job that uses it."""
        return [one.problem for one in self.conflicts if (one.kind, one.name) == (kind, name)]

    def all(self, kind: type[C]) -> list[C]:
        """Return all components of class ``kind`` or a subclass, in order of discovery."""
        return [component for plugin in self.found.plugins for component in plugin.components if isinstance(component, kind)]

    def get(self, kind: type[C], name: str) -> C:
        """Return the component of this kind and name.

        Raises:
            UserError: it does not exist (the fix names the nearest match and broken plugins), or several plugins claim it.
        """
        self.require_unclaimed(kind.kind, name)
        found = next((component for component in self.all(kind) if component.name == name), None)
        if found is None:
            raise UserError.one(f"{kind.kind} {name!r}", self.unknown(kind), self.suggest(kind, name))
        return found

    def names(self, kind: type[C]) -> list[str]:
        """Return the names of all components of this kind."""
        return [component.name for component in self.all(kind)]

    @staticmethod
    def unknown(kind: type[C]) -> str:
        """Return a reason such as 'no installed plugin provides this model'."""
        return f"no installed plugin provides this {kind.kind}"

    def suggest(self, kind: type[C], name: str) -> str:
        """Return a fix for an unknown ``name``: the nearest match, the package to install or the plugin to fix."""
        package = provider(kind.kind, name)
        if package is not None and package not in {plugin.distribution for plugin in self.found.plugins}:
            return self.remedy(package)
        return nearest(name, self.names(kind)) + self.broken_note()

    def modules(self) -> list[tuple[ModuleType, Origin]]:
        """See :meth:`titan_core.api.Registry.modules`."""
        return [(plugin.module, plugin.origin) for plugin in self.found.plugins]

    def versions(self) -> list[dict[str, str]]:
        """See :meth:`titan_core.api.Registry.versions`."""
        return [
            {"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version}
            for plugin in self.found.plugins
        ]

    def distribution(self, component: Component) -> str:
        """See :meth:`titan_core.api.Registry.distribution`."""
        return self.owner(component).distribution

    def owner(self, component: Component) -> Plugin:
        """Return the plugin that registered ``component``."""
        return next(
            plugin for plugin in self.found.plugins if any(component is registered for registered in plugin.components)
        )

    def origin(self, component: Component) -> Origin:
        """Return the origin for calls of ``component``."""
        return replace(self.owner(component).origin, component=f"{component.kind} {component.name!r}")

    def origin_of(self, section: type[Section]) -> Origin:
        """Return the origin of a section class: the first plugin with a component that uses it, else the core."""
        for plugin in self.found.plugins:
            if any(component.config is section for component in plugin.components):
                return plugin.origin
        return next((plugin.origin for plugin in self.found.plugins if plugin.name == CORE), NO_PLUGIN)

    def sections(self) -> dict[str, list[type[Section]]]:
        """Return section name -> the classes that own its keys, the core's first."""
        owned: dict[str, list[type[Section]]] = {cls.section: [cls] for cls in CORE_SECTIONS}
        for kind in REGISTRATION_HOOKS.values():
            for component in self.all(kind):
                if component.config is not None:
                    owners = owned.setdefault(component.config.section, [])
                    if component.config not in owners:
                        owners.append(component.config)
        return owned

    def remedy(self, package: str) -> str:
        """Return how to make Titan's ``package`` provide a missing component: install it, fix it or switch it on."""
        for broken in self.found.broken:
            if broken.distribution == package:
                return f"{package} {broken.version} is installed but broken: {broken.reason}"
        if any(plugin.distribution == package for plugin in self.found.plugins):
            return f"{package} is installed, but this version of it does not provide this"
        if any(disabled.distribution == package for disabled in self.found.disabled):
            return f"{package} is switched off ([plugins] disable, or TITAN_DISABLE_PLUGINS)"
        return how_to_install(package) + self.broken_note()

    def broken_note(self) -> str:
        """Return a clause that lists broken plugins, because one of them may provide the missing component."""
        return "".join(
            f"; plugin {broken.name!r} ({broken.distribution}) is broken: {broken.reason}" for broken in self.found.broken
        )


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
