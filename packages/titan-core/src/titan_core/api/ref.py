"""Lazy references: name the code that builds a component without importing it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from titan_core.api.errors import UserError

T = TypeVar("T")


class CodeOrigin(Protocol):
    """The plugin that code belongs to. Calls are guarded: what they raise is reported with the plugin's name."""

    def failure(self, why: str) -> UserError:
        """The error that names the plugin, ``why`` and the fix."""
        ...

    def guard_ref(self, purpose: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, guarded; its result is checked by ``purpose``, the component's field that refers to it."""
        ...

    def guard(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, guarded; errors call it ``what``."""
        ...

    def guard_wrapper(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a hook wrapper, a generator function."""
        ...


@dataclass(frozen=True)
class Ref(Generic[T]):
    """A reference ``"package.module:attribute"``, imported only when a job needs it.

    Discovery thus stays free of torch, and a component whose code is broken fails only the jobs that select it.
    """

    target: str
    origin: CodeOrigin | None = field(default=None, compare=False, kw_only=True)
    """Whose component it belongs to. Discovery sets it, and thereby has every call guarded."""
    purpose: str = field(default="", compare=False, kw_only=True)
    """The component's field that holds it, such as ``check``; likewise."""

    def __post_init__(self) -> None:
        module, colon, attribute = self.target.partition(":")
        if not (module and colon and attribute):
            raise ValueError(f"a Ref is written 'package.module:attribute', not {self.target!r}")

    def load(self) -> T:
        """Import and return what is referred to.

        Raises:
            UserError: the module cannot be imported, or lacks the attribute.
        """
        module_name, _, attribute = self.target.partition(":")
        where = f"plugin code {self.target!r}" if self.origin is None else f"{self.origin}: {self.purpose} = {self.target!r}"
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            # Whatever a third party's module raises while it is imported is that plugin's fault, and reported as such.
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
            raise self.origin.failure(f"{self.purpose} = {self.target!r} is no function, but {type(found).__name__}")
        return cast(T, self.origin.guard_ref(self.purpose, found))
