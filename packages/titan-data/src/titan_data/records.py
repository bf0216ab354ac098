"""Extracts the text of a record: one of its fields, or the result of the user's formatting function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from titan_core.api.dataset import CorruptRecord, DatasetContext, Document
from titan_core.api.errors import Problem, UserError
from titan_core.api.ref import Ref
from titan_core.api.tools.plain_json import json_kind

Reader: TypeAlias = Callable[[Any, str], Document]
"""(record, its place for error messages) -> document; raises :class:`~titan_core.api.dataset.CorruptRecord`."""

FIELD_FIX = "set data.text_field, or data.format"


def missing_field(field: str, names: Iterable[str]) -> str:
    """Return the reason that reports a missing text field, with the fields that exist."""
    return f"no field {field!r} (fields: {', '.join(names)})"


def reads_text(context: DatasetContext[Any]) -> Reader:
    """Return the reader of records with a text."""
    return lambda record, place: text_of(record, context, place)


def text_of(record: Any, context: DatasetContext[Any], place: str) -> str:
    """Return the text of ``record``.

    Args:
        place: where the record comes from, for error messages.

    Raises:
        CorruptRecord: the record has no text.
    """
    if not isinstance(record, Mapping):
        raise CorruptRecord(place, f"a record must be a JSON object, not {json_kind(record)}")
    if context.format is not None:
        return _formatted(record, context.format, place)
    text = record.get(context.text_field)
    if isinstance(text, str):
        return text
    if context.text_field not in record:
        raise CorruptRecord(place, missing_field(context.text_field, record), FIELD_FIX)
    raise CorruptRecord(place, f"field {context.text_field!r} contains {json_kind(text)}, not text")


def converted(record: Any, context: DatasetContext[Any], place: str) -> Any:
    """Return ``record``, or the record that the formatting function makes of it.

    Raises:
        CorruptRecord: the function raised an error.
    """
    if context.format is None:
        return record
    return _called(record, context.format, place)


def check_format(context: DatasetContext[Any]) -> list[Problem]:
    """Check that the formatting function can be loaded and called."""
    if context.format is None:
        return []
    where = f"format {context.format!r}"
    try:
        function = Ref[Any](context.format).load()
    except ValueError as error:
        return [Problem(where, str(error), 'write "package.module:function"')]
    except UserError as error:
        return list(error.problems)
    if callable(function):
        return []
    return [Problem(where, "not a function", "name a function that takes a record and returns text")]


@functools.cache
def _loaded(function: str) -> Callable[[Mapping[str, Any]], Any]:
    """Import the function once, not for each record."""
    call: Callable[[Mapping[str, Any]], Any] = Ref[Any](function).load()
    return call


def _called(record: Mapping[str, Any], function: str, place: str) -> Any:
    call = _loaded(function)
    try:
        return call(record)
    except Exception as error:
        # The user's function may raise anything, and the cause may be the record or the function.
        raise CorruptRecord(place, f"{function} raised {type(error).__name__}: {error}", "fix the function") from error


def _formatted(record: Mapping[str, Any], function: str, place: str) -> str:
    text = _called(record, function, place)
    if not isinstance(text, str):
        raise CorruptRecord(place, f"{function} returned {type(text).__name__}, not text", "fix the function")
    return text
