"""What the discovered plugins provide, by kind and name."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeVar

from titan_core.api.ref import CodeOrigin

if TYPE_CHECKING:
    from titan_core.api.components import Component

C = TypeVar("C", bound="Component")


class ComponentRegistry(Protocol):
    """All components of all plugins. pluggy collected them; a job's config chooses among them by name."""

    def all(self, kind: type[C]) -> list[C]:
        """All components of exactly this kind or a subclass of it, in the order of discovery."""
        ...

    def get(self, kind: type[C], name: str) -> C:
        """The component of this kind and name.

        Raises:
            UserError: there is none; its reason names the nearest, and plugins that are broken.
        """
        ...

    def names(self, kind: type[C]) -> list[str]:
        """The names of all components of this kind."""
        ...

    def origin(self, component: Component) -> CodeOrigin:
        """The plugin that registered ``component``."""
        ...

    def distribution(self, component: Component) -> str:
        """The distribution that registered ``component``."""
        ...

    def modules(self) -> Sequence[tuple[ModuleType, CodeOrigin]]:
        """Every plugin's module, which may have lifecycle hooks."""
        ...

    def versions(self) -> list[dict[str, str]]:
        """Name, distribution and version of every plugin."""
        ...
