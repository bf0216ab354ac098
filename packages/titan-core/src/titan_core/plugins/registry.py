"""What the discovered plugins provide, by kind and name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import TypeVar

from titan_core.api.components import Component
from titan_core.api.errors import Problem, UserError, nearest
from titan_core.api.section import Section
from titan_core.api.sections import CORE_SECTIONS
from titan_core.plugins.discovery import CORE, REGISTRATION_HOOKS, BrokenPlugin, DisabledPlugin, Discovery, Plugin, discover
from titan_core.plugins.guard import Origin
from titan_core.plugins.providers import provider

C = TypeVar("C", bound=Component)

NO_PLUGIN = Origin(CORE, "titan-core", "?", removable=False)
"""Where not even the core was discovered, in tests."""


@dataclass(frozen=True)
class Registry:
    """All components of all plugins. pluggy collected them; a job's config chooses among them by name."""

    found: Discovery

    @classmethod
    def from_installed(cls) -> Registry:
        """The registry of everything that is installed."""
        return cls(discover())

    def without(self, names: Iterable[str]) -> Registry:
        """This registry with the plugins ``names`` switched off. A name that no plugin has is an error."""
        names = list(names)
        if not names:
            return self
        found = self.found
        everything: list[Plugin | BrokenPlugin | DisabledPlugin] = [*found.plugins, *found.broken, *found.disabled]
        known = [plugin.name for plugin in everything]
        for name in names:
            if name not in known:
                raise UserError.one(f"plugins.disable = {names}", f"no plugin is named {name!r}", nearest(name, known))
        disabled = {
            one.name: DisabledPlugin(one.name, one.distribution, one.version)
            for one in everything
            if one.name in names or one in found.disabled
        }
        return Registry(
            Discovery(
                tuple(plugin for plugin in found.plugins if plugin.name not in names),
                tuple(broken for broken in found.broken if broken.name not in names),
                tuple(disabled.values()),
            )
        )

    @cached_property
    def conflicts(self) -> list[Problem]:
        """Two plugins of one name, two components of one kind and name, two classes for one key."""
        problems = []
        plugins: dict[str, Plugin] = {}
        components: dict[tuple[str, str], Plugin] = {}
        keys: dict[str, tuple[type[Section], Plugin | None]] = {
            f"{cls.section}.{key}": (cls, None) for cls in CORE_SECTIONS for key in cls.model_fields
        }
        for plugin in self.found.plugins:
            if plugin.name in plugins:
                problems.append(_conflict(f"plugin {plugin.name!r}", plugins[plugin.name], plugin))
                continue  # its components would only repeat the same complaint
            plugins[plugin.name] = plugin
            for component in plugin.components:
                key = (component.kind, component.name)
                if key in components:
                    problems.append(_conflict(f"{key[0]} {component.name!r}", components[key], plugin))
                components.setdefault(key, plugin)
                for field in component.config.model_fields if component.config is not None else ():
                    assert component.config is not None
                    name = f"{component.config.section}.{field}"
                    owner_class, owner = keys.setdefault(name, (component.config, plugin))
                    if owner_class is not component.config:
                        problems.append(_conflict(f"config key {name}", owner, plugin))
        return problems

    def require_sound(self) -> None:
        """Raise where two plugins claim one name.

        Raises:
            UserError: naming both distributions.
        """
        if self.conflicts:
            raise UserError(*self.conflicts)

    def all(self, kind: type[C]) -> list[C]:
        """All components of exactly this kind or a subclass of it, in the order of discovery."""
        return [component for plugin in self.found.plugins for component in plugin.components if isinstance(component, kind)]

    def get(self, kind: type[C], name: str) -> C:
        """The component of this kind and name.

        Raises:
            UserError: there is none; its reason names the nearest, and plugins that are broken.
        """
        found = next((component for component in self.all(kind) if component.name == name), None)
        if found is None:
            raise UserError.one(f"{kind.kind} {name!r}", self.unknown(kind), self.suggest(kind, name))
        return found

    def names(self, kind: type[C]) -> list[str]:
        """The names of all components of this kind."""
        return [component.name for component in self.all(kind)]

    @staticmethod
    def unknown(kind: type[C]) -> str:
        """'no installed plugin provides this model'."""
        return f"no installed plugin provides this {kind.kind}"

    def suggest(self, kind: type[C], name: str) -> str:
        """What to do about an unknown ``name``: the nearest there is, the package to install, the plugin to fix."""
        package = provider(kind.kind, name)
        if package is not None and package not in {plugin.distribution for plugin in self.found.plugins}:
            return self.remedy(package)
        return nearest(name, self.names(kind)) + self.broken_note()

    def modules(self) -> list[tuple[ModuleType, Origin]]:
        """See :meth:`titan_core.api.registry.ComponentRegistry.modules`."""
        return [(plugin.module, plugin.origin) for plugin in self.found.plugins]

    def versions(self) -> list[dict[str, str]]:
        """See :meth:`titan_core.api.registry.ComponentRegistry.versions`."""
        return [
            {"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version}
            for plugin in self.found.plugins
        ]

    def distribution(self, component: Component) -> str:
        """See :meth:`titan_core.api.registry.ComponentRegistry.distribution`."""
        return self.owner(component).distribution

    def owner(self, component: Component) -> Plugin:
        """The plugin that registered ``component``."""
        return next(plugin for plugin in self.found.plugins if any(component is one for one in plugin.components))

    def origin(self, component: Component) -> Origin:
        """Whose code a call of ``component``'s is."""
        return replace(self.owner(component).origin, component=f"{component.kind} {component.name!r}")

    def origin_of(self, section: type[Section]) -> Origin:
        """Whose code a config section's is: the first plugin's that registers a component with it, else the core's."""
        for plugin in self.found.plugins:
            if any(component.config is section for component in plugin.components):
                return plugin.origin
        return next((plugin.origin for plugin in self.found.plugins if plugin.name == CORE), NO_PLUGIN)

    def sections(self) -> dict[str, list[type[Section]]]:
        """Every section, with the classes that own keys in it: the core's first."""
        owned: dict[str, list[type[Section]]] = {cls.section: [cls] for cls in CORE_SECTIONS}
        for kind in REGISTRATION_HOOKS.values():
            for component in self.all(kind):
                if component.config is not None:
                    owners = owned.setdefault(component.config.section, [])
                    if component.config not in owners:
                        owners.append(component.config)
        return owned

    def remedy(self, package: str) -> str:
        """What to do so that Titan's ``package`` provides what is missing: install it, fix it, or switch it on."""
        for broken in self.found.broken:
            if broken.distribution == package:
                return f"{package} {broken.version} is installed, but broken: {broken.reason}"
        if any(plugin.distribution == package for plugin in self.found.plugins):
            return f"{package} is installed, but its present version does not provide this"
        if any(disabled.distribution == package for disabled in self.found.disabled):
            return f"{package} is switched off ([plugins] disable, or TITAN_DISABLE_PLUGINS)"
        return f"install {package} (`uv pip install {package}`)" + self.broken_note()

    def broken_note(self) -> str:
        """A clause about plugins that are broken, since one of them may be what is missing."""
        notes = [f"plugin {one.name!r} ({one.distribution}) is broken: {one.reason}" for one in self.found.broken]
        return "".join(f"; {note}" for note in notes)


def _conflict(what: str, first: Plugin | None, second: Plugin) -> Problem:
    one = f"{first.distribution} {first.version}" if first is not None else "titan-core itself"
    two = f"{second.distribution} {second.version}"
    name = second.name if first is None or first.name != second.name else None
    fix = f'switch one off ([plugins] disable = ["{name}"])' if name else "uninstall one of them"
    return Problem(what, f"claimed by both {one} and {two}", fix)
