"""Values of Arrow columns as those of Python: what ``datasets`` yields for the same file, or a refusal that names the type.

pyarrow's own conversion returns how a type is stored where the type means more: the text of a JSON value, the numbers of a
tensor without its shape, the pairs of a map, and nothing of what an extension type of someone else means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import pyarrow
from pyarrow import types

from titan_core.api import CorruptRecord
from titan_core.toolkit.plain_json import parse_json

Conversion: TypeAlias = Callable[[Any], Any] | None
"""Converts what pyarrow returns; ``None`` if that is the value."""

_EXTENSION: Final = b"ARROW:extension:name"
_ARRAYS: Final = "datasets.features.features.Array"
"""Begins the names of the types of ``datasets`` for arrays (``Array2D``), which are stored as lists of lists."""
_MEDIA: Final = {"bytes", "path"}
"""The fields in which ``datasets`` stores images, audio and other files."""
_SIMPLE: Final = (
    types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_decimal128, types.is_decimal256,
    types.is_date, types.is_time, types.is_timestamp, types.is_duration, types.is_string, types.is_large_string,
    types.is_string_view, types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary,
)  # fmt: skip


class UnreadableType(Exception):
    """``datasets`` has no value for a type. The message names it."""


def features_of(schema: pyarrow.Schema) -> Mapping[str, Any]:
    """Return what ``datasets`` has recorded of the columns of a file that it wrote, by name."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


def conversion(field: pyarrow.Field, feature: Any = None) -> Conversion:
    """Return what converts the values of a column, or of a field in one.

    Args:
        feature: what ``datasets`` has recorded of it.

    Raises:
        UnreadableType: they have no value.
    """
    of, about, extension = field.type, feature if isinstance(feature, Mapping) else {}, _extension(field)
    if isinstance(of, pyarrow.JsonType):
        return parse_json if about.get("decode", True) else None
    if extension.startswith(_ARRAYS):
        return None
    if extension:
        raise UnreadableType(f"the extension type {extension}")
    if types.is_struct(of):
        return _of_struct(of, about)
    if types.is_list(of) or types.is_large_list(of) or types.is_fixed_size_list(of):
        inner = conversion(of.value_field, feature[0] if isinstance(feature, list) and feature else about.get("feature"))
        return inner and (lambda values: [value if value is None else inner(value) for value in values])
    if any(matches(of.value_type if types.is_dictionary(of) else of) for matches in _SIMPLE):
        return None
    raise UnreadableType(str(of))


def described(field: pyarrow.Field) -> str:
    """Return the type of a column. That of an extension type does not depend on whether a library has registered it in this
    process."""
    of = field.type.storage_type if isinstance(field.type, pyarrow.BaseExtensionType) else field.type
    parts = [of.field(number) for number in range(of.num_fields)]
    named = types.is_struct(of)  # elements of lists have other names where the storage of an extension type is known
    inner = ", ".join((f"{part.name}: " if named else "") + described(part) for part in parts)
    return f"{_extension(field)} {f'{of.id}<{inner}>' if inner else of}"


def _extension(field: pyarrow.Field) -> str:
    """Return the name of an extension type; empty if it is none."""
    unregistered = (field.metadata or {}).get(_EXTENSION, b"").decode(errors="replace")
    return unregistered or getattr(field.type, "extension_name", "")


def _of_struct(of: pyarrow.StructType, about: Mapping[str, Any]) -> Conversion:
    names = [of.field(number).name for number in range(of.num_fields)]
    if len(set(names)) != len(names):
        raise UnreadableType(f"{of}, which has two fields of one name")
    if set(names) == _MEDIA and isinstance(kind := about.get("_type"), str) and about.get("decode", True):
        raise UnreadableType(f"the type {kind} of datasets")
    fields = about.get("feature", about)
    inner = {name: conversion(of.field(name), fields.get(name) if isinstance(fields, Mapping) else None) for name in names}
    if not any(inner.values()):
        return None
    return lambda value: {
        name: item if item is None or (convert := inner[name]) is None else convert(item) for name, item in value.items()
    }


def record_of(row: pyarrow.Table, conversions: Mapping[str, Conversion], place: str) -> dict[str, Any]:
    """Return the values of a table of one row.

    Raises:
        CorruptRecord: one of them cannot be represented, such as a date after the year 9999 or a text that is not JSON.
        UnicodeDecodeError: one is not UTF-8.
    """
    record = {}
    for field, column in zip(row.schema, row.columns, strict=True):
        try:
            value, convert = column[0].as_py(), conversions[field.name]
            record[field.name] = value if value is None or convert is None else convert(value)
        except UnicodeDecodeError:
            raise
        except (ValueError, OverflowError, LookupError, pyarrow.ArrowException) as error:  # LookupError: no such time zone
            why = f"column {field.name!r} ({field.type}) has a value that cannot be read: {' '.join(str(error).split())}"
            raise CorruptRecord(place, why, 'fix it, or set data.on_corrupt = "skip"') from None
    return record
