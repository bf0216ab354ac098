"""Lazy references: name the code that builds a component without importing it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from titan_core.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Ref(Generic[T]):
    """A reference ``"package.module:attribute"``, imported only when a job needs it.

    Discovery thus stays free of torch, and a component whose code is broken fails only the jobs that select it.
    """

    target: str

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
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            # Whatever a third party's module raises while it is imported is that plugin's fault, told as such.
            raise UserError.one(
                f"plugin code {self.target!r}",
                f"importing {module_name!r} raised {type(error).__name__}: {error}",
                "mend or reinstall the package that it belongs to, or set TITAN_TRACEBACK=1 to see the traceback",
            ) from error
        try:
            return cast(T, getattr(module, attribute))
        except AttributeError:
            raise UserError.one(
                f"plugin code {self.target!r}",
                f"{module_name!r} has no attribute {attribute!r}",
                "mend the plugin that refers to it",
            ) from None
