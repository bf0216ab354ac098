"""Objects that plugins build: their methods are guarded in the object's own class, so that every later call is, whoever
makes it, and ``isinstance`` still holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from titan_core.api.plugins.ref import CodeOrigin

Check = Callable[[CodeOrigin, Any], Any]
"""Checks what a plugin's function returned, and returns the value that the core uses. Raises :class:`WrongResult`."""
_MISSING = object()


class WrongResult(Exception):
    """The reason why a result is unusable, such as ``"returned 3; it must return True or False"``."""


def guarded_object(
    origin: CodeOrigin, made: Any, members: Mapping[str, Check | None], required: str, optional: Mapping[str, Check | None]
) -> Any:
    """Return ``made`` with its ``members`` and ``optional`` ones guarded by ``origin``. An object is guarded once: one that
    a plugin only passes on keeps its owner.

    Args:
        members: name of a method or property -> check of its result.
        required: what has these members, for the error.

    Raises:
        WrongResult: ``made`` lacks a member, or is not an instance of a class of Python.
    """
    if isinstance(made, type):
        raise WrongResult(f"returned the class {made.__name__}; it must return an instance")
    for name in members:
        if not _has(made, name):
            raise WrongResult(f"returned {shown(made)}, which has no {name!r}; it must return a {required}")
    if hasattr(type(made), "_titan_guard"):
        return made
    checks = {**members, **{name: check for name, check in optional.items() if _has(made, name)}}
    cls = type(made)
    for name, check in checks.items():
        value = vars(made).get(name, _MISSING) if hasattr(made, "__dict__") else _MISSING
        if value is _MISSING and inspect.getattr_static(cls, name, _MISSING) is _MISSING and not name.startswith("__"):
            value = getattr(made, name)  # an object that delegates to another
        if callable(value):
            object.__setattr__(made, name, origin.guard(name, value, check))
    try:
        object.__setattr__(made, "__class__", _guarded_class(cls, origin, tuple(checks.items())))  # type: ignore[arg-type] # hashable
    except TypeError:
        raise WrongResult(f"returned {shown(made)}; it must return an instance of a class written in Python") from None
    return made


@cache
def _guarded_class(cls: type, origin: CodeOrigin, checks: tuple[tuple[str, Check | None], ...]) -> type:
    """Return a subclass of ``cls`` that differs only in that its members are guarded."""
    namespace: dict[str, Any] = {
        "__slots__": (),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_titan_guard": True,
    }
    for name, check in checks:
        found = inspect.getattr_static(cls, name, _MISSING)
        if callable(found) or isinstance(found, staticmethod | classmethod):
            namespace[name] = _method(cls, origin, name, check)
        elif hasattr(found, "__get__") and not inspect.ismemberdescriptor(found):
            namespace[name] = property(_getter(cls, origin, name, check))
    return type(cls)(cls.__name__, (cls,), namespace)


def _method(cls: type, origin: CodeOrigin, name: str, check: Check | None) -> Callable[..., Any]:
    found = getattr(cls, name)
    static = inspect.getattr_static(cls, name)
    call = origin.guard(name, found, check)
    return staticmethod(call) if isinstance(static, staticmethod | classmethod) else call


def _getter(cls: type, origin: CodeOrigin, name: str, check: Check | None) -> Callable[[Any], Any]:
    descriptor = inspect.getattr_static(cls, name)
    return origin.guard(name, lambda self: descriptor.__get__(self, type(self)), check)


def _has(made: Any, name: str) -> bool:
    """Whether ``made`` has the member, without evaluating a property."""
    if inspect.getattr_static(made, name, _MISSING) is not _MISSING:
        return True
    return not name.startswith("__") and hasattr(type(made), "__getattr__") and hasattr(made, name)


def class_at(place: str) -> Any:
    """Return the class at ``"module:name"``, which is imported only now."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message, or the name of its class if that is long or fails."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of an object of a plugin, which is being reported
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"a {type(value).__name__}"
