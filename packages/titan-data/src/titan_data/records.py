"""From a record to its text: one field of it, or what the user's own function makes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from titan_core.api.dataset import CorruptRecord, DatasetContext
from titan_core.api.errors import Problem, UserError
from titan_core.api.ref import Ref


def text_of(record: Any, context: DatasetContext[None], place: str) -> str:
    """The text of ``record``, which was found at ``place``.

    Raises:
        CorruptRecord: it has none.
    """
    if not isinstance(record, Mapping):
        raise CorruptRecord(place, f"a record is a JSON object, not {type(record).__name__}")
    if context.format is not None:
        return _formatted(record, context.format, place)
    text = record.get(context.text_field)
    if isinstance(text, str):
        return text
    if context.text_field not in record:
        raise CorruptRecord(place, f"no field {context.text_field!r}; there is {', '.join(record)}", "set data.text_field")
    raise CorruptRecord(place, f"field {context.text_field!r} holds {type(text).__name__}, not text")


def check_format(context: DatasetContext[None]) -> list[Problem]:
    """Whether the formatting function can be called."""
    if context.format is None:
        return []
    where = f"format {context.format!r}"
    try:
        function = Ref[Any](context.format).load()
    except ValueError as error:
        return [Problem(where, str(error), 'write "package.module:function"')]
    except UserError as error:
        return list(error.problems)
    return [] if callable(function) else [Problem(where, "not a function", "name one that takes a record and returns text")]


@functools.cache
def _loaded(function: str) -> Callable[[Mapping[str, Any]], Any]:
    """Looked up once, not for each record."""
    call: Callable[[Mapping[str, Any]], Any] = Ref[Any](function).load()
    return call


def _formatted(record: Mapping[str, Any], function: str, place: str) -> str:
    call = _loaded(function)
    try:
        text = call(record)
    except Exception as error:
        # The user's own code may raise anything, and the reason is as often the record as the code.
        raise CorruptRecord(place, f"{function} raised {type(error).__name__}: {error}", "fix the function") from error
    if not isinstance(text, str):
        raise CorruptRecord(place, f"{function} returned {type(text).__name__}, not text", "fix the function")
    return text
