"""Messages between a process and its renderer of templates: sizes, and JSON, in which values of a few further types are
texts with the name of their type. Imports the standard library only."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

REQUEST: Final = struct.Struct(">QQ?")
"""Sizes of the template and of the values in bytes, and whether :func:`decode` has to look for further types."""
ANSWER: Final = struct.Struct(">Q")
"""Size of the answer in bytes."""

_TYPE: Final = "\ue000type"
"""Key of an object that stands for a value of a further type."""


class _Form(NamedTuple):
    write: Callable[[Any], str]
    read: Callable[[str], Any]


_FORMS: Final = {
    datetime: _Form(datetime.isoformat, datetime.fromisoformat),
    date: _Form(date.isoformat, date.fromisoformat),
    time: _Form(time.isoformat, time.fromisoformat),
    timedelta: _Form(lambda value: str(value // timedelta(microseconds=1)), lambda text: timedelta(microseconds=int(text))),
    Decimal: _Form(str, Decimal),
    UUID: _Form(str, UUID),
    bytes: _Form(lambda value: base64.b64encode(value).decode(), base64.b64decode),
}
_NAMES: Final = {kind.__name__: form for kind, form in _FORMS.items()}


def encode(values: Mapping[str, Any] | None) -> tuple[bytes, bool]:
    """Return ``values`` as JSON, and whether there are values of further types.

    Raises:
        TypeError: there are values of other types.
        ValueError: a value contains itself, or is a number that is too long.
        RecursionError: they are nested too deep.
    """
    typed = False

    def further(value: Any) -> dict[str, str]:
        nonlocal typed
        typed = True
        for kind, form in _FORMS.items():
            if isinstance(value, kind):
                return {_TYPE: kind.__name__, "text": form.write(value)}
        raise TypeError(f"a template reads no value of the type {type(value).__name__}")

    return json.dumps(values, default=further).encode(), typed


def decode(encoded: bytes, typed: bool) -> Any:
    """Return what :func:`encode` has encoded."""
    return json.loads(encoded, object_hook=_further if typed else None)


def _further(value: dict[str, Any]) -> Any:
    return _NAMES[value[_TYPE]].read(value["text"]) if _TYPE in value else value
