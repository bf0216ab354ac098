"""Lazy references, which name the code that builds a component without importing it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from titan_core.api.plugins.errors import UserError, shown

R = TypeVar("R")
T = TypeVar("T")


class CodeOrigin(Protocol):
    """The plugin that code belongs to. Exceptions that the code raises are reported with the plugin's name."""

    def failure(self, why: str) -> UserError:
        """Return an error that names the plugin, ``why`` and the fix."""

    def call(self, what: str, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Return ``function(*arguments, **keywords)``. What it raises is reported with the plugin's name and as that of
        ``what``."""

    def guard_hook(self, hook: str, function: Callable[..., Any], wraps: bool) -> Callable[..., Any]:
        """Return a lifecycle hook whose every call goes through :meth:`call`; ``wraps``: it is a wrapper, a generator
        function."""


@dataclass(frozen=True)
class Ref(Generic[T]):
    """A reference ``"package.module:attribute"``, imported only when a job needs it.

    Discovery therefore needs no torch, and a component with broken code fails only the jobs that select it.
    """

    target: str
    """``"package.module:attribute"``."""
    origin: CodeOrigin | None = field(default=None, compare=False, kw_only=True)
    """The plugin of the component. Discovery sets it, which guards every call."""
    purpose: str = field(default="", compare=False, kw_only=True)
    """The field that holds the reference, such as ``check``. Discovery sets it."""

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
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            # Any exception during the import of a third party's module is that plugin's fault, and reported as such.
            raise UserError.one(
                self._where,
                f"importing {module_name!r} raised {type(error).__name__}: {error}",
                "fix or reinstall the package that it belongs to, or set TITAN_TRACEBACK=1 to see the traceback",
            ) from error
        try:
            found = getattr(module, attribute)
        except AttributeError:
            raise UserError.one(
                self._where, f"{module_name!r} has no attribute {attribute!r}", "fix the plugin that refers to it"
            ) from None
        if self.origin is None:
            return cast(T, found)
        if not callable(found):
            raise self.origin.failure(f"{self.purpose} = {self.target!r} is not a function, but {type(found).__name__}")
        return cast(T, partial(self.origin.call, self.purpose, found))

    def call(self, kind: Callable[..., R], *arguments: Any) -> R:
        """Call the function, and return its result, an instance of the class ``kind``.

        Raises:
            UserError: the result is no instance of it; or as :meth:`load`.
        """
        found, cls = cast("Callable[..., Any]", self.load())(*arguments), cast("type[R]", kind)
        if not isinstance(found, cls) or (cls is int and isinstance(found, bool)):
            raise self.wrong(f"returned {shown(found)}; it must return a {cls.__name__}")
        return found

    def call_list(self, kind: type[R], *arguments: Any) -> list[R]:
        """Call the function, which returns or yields instances of ``kind``, and return these.

        Raises:
            UserError: it returns something else; or as :meth:`load`.
        """
        found: Any = cast("Callable[..., Any]", self.load())(*arguments)
        if isinstance(found, Iterable) and not isinstance(found, str):
            found = list(found) if self.origin is None else self.origin.call(self.purpose, list, found)
        if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
            raise self.wrong(f"returned {shown(found)}; it must return or yield {kind.__name__}s")
        return found

    @property
    def _where(self) -> str:
        target = f"plugin code {self.target!r}"
        return target if self.origin is None else f"{self.origin}: {self.purpose} = {self.target!r}"

    def wrong(self, why: str) -> UserError:
        """Return the error that the function did something wrong: ``why``."""
        if self.origin is None:
            return UserError.one(f"plugin code {self.target!r}", why, "fix its plugin")
        return self.origin.failure(f"{self.purpose} {why}")
