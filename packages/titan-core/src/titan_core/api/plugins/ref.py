"""Lazy references, which name the code that builds a component without importing it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from titan_core.api.plugins.errors import UserError

T = TypeVar("T")


class CodeOrigin(Protocol):
    """The plugin that code belongs to. It guards calls, so that exceptions are reported with the plugin's name."""

    def failure(self, why: str) -> UserError:
        """Return an error that names the plugin, ``why`` and the fix."""

    def guard(
        self, what: str, function: Callable[..., Any], check: Callable[[Any, Any], Any] | None = None
    ) -> Callable[..., Any]:
        """Return ``function`` guarded. Errors refer to it as ``what``. ``check`` receives the origin and the result, and
        returns the result to use."""

    def guard_ref(self, row: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` guarded. The component field ``row`` (``Class.field``) selects the check of its result."""

    def guard_hook(self, hook: str, function: Callable[..., Any], wraps: bool) -> Callable[..., Any]:
        """Return a lifecycle hook guarded; ``wraps``: it is a wrapper, a generator function."""


@dataclass(frozen=True)
class Ref(Generic[T]):
    """A reference ``"package.module:attribute"``, imported only when a job needs it.

    Discovery therefore needs no torch, and a component with broken code fails only the jobs that select it.
    """

    target: str
    origin: CodeOrigin | None = field(default=None, compare=False, kw_only=True)
    """The plugin of the component. Discovery sets it, which guards every call."""
    purpose: str = field(default="", compare=False, kw_only=True)
    """The field that holds the reference, such as ``Dataset.check``. Discovery sets it."""

    def __post_init__(self) -> None:
        module, colon, attribute = self.target.partition(":")
        if not (module and colon and attribute):
            raise ValueError(f"a Ref is written 'package.module:attribute', not {self.target!r}")

    def load(self) -> T:
        """Import and return the referenced object.

        Raises:
            UserError: the module cannot be imported, or lacks the attribute.
        """
        module_name, _, attribute = self.target.partition(":")
        field = self.purpose.partition(".")[2]
        where = f"plugin code {self.target!r}" if self.origin is None else f"{self.origin}: {field} = {self.target!r}"
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            # Any exception during the import of a third party's module is that plugin's fault, and reported as such.
            raise UserError.one(
                where,
                f"importing {module_name!r} raised {type(error).__name__}: {error}",
                "fix or reinstall the package that it belongs to, or set TITAN_TRACEBACK=1 to see the traceback",
            ) from error
        try:
            found = getattr(module, attribute)
        except AttributeError:
            raise UserError.one(
                where, f"{module_name!r} has no attribute {attribute!r}", "fix the plugin that refers to it"
            ) from None
        if self.origin is None:
            return cast(T, found)
        if not callable(found):
            raise self.origin.failure(f"{field} = {self.target!r} is not a function, but {type(found).__name__}")
        return cast(T, self.origin.guard_ref(self.purpose, found))
