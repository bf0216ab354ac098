"""The components of all discovered plugins, by kind and name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeVar

from titan_core.api.plugins.ref import CodeOrigin

if TYPE_CHECKING:
    from titan_core.api.config.section import Section
    from titan_core.api.plugins.component import Component

C = TypeVar("C", bound="Component")


class Registry(Protocol):
    """All components that pluggy has collected from plugins. A job's config selects among them by name."""

    def all(self, kind: type[C]) -> list[C]:
        """Return all components of this kind or a subclass of it, in discovery order."""

    def get(self, kind: type[C], name: str) -> C:
        """Return the component of this kind and name.

        Raises:
            UserError: there is no such component. The error suggests the nearest name and lists broken plugins.
        """

    def names(self, kind: type[C]) -> list[str]:
        """Return the names of all components of this kind."""

    def origin(self, component: Component) -> CodeOrigin:
        """Return the plugin that registered ``component``."""

    def distribution(self, component: Component) -> str:
        """Return the distribution that registered ``component``."""

    def modules(self) -> Sequence[tuple[ModuleType, CodeOrigin]]:
        """Return every plugin's module. These may have lifecycle hooks."""

    def sections(self) -> Mapping[str, Sequence[type[Section]]]:
        """Return section name -> the classes that own its keys, the core's first."""

    def versions(self) -> list[dict[str, str]]:
        """Return name, distribution and version of every plugin."""
