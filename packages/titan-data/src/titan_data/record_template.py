"""Templates of a record's fields (``data.format``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, Undefined, UndefinedError

from titan_core.api import CorruptRecord, UserError
from titan_core.toolkit.plain_json import json_kind
from titan_core.toolkit.text import shorten
from titan_data.bounded_templates import BoundedEnvironment, TooMuch

_EXAMPLE = 'write fields between braces, as in "{{ question }} {{ answer }}"'


class RecordTemplate:
    """A template whose variables are the fields of a record; ``record`` is the record itself (``record["my field"]``)."""

    def __init__(self, source: str, key: str) -> None:
        """
        Args:
            key: the config key that contains ``source``, for error messages.

        Raises:
            UserError: ``source`` is not a template.
        """
        self._key = key
        environment = BoundedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_text)
        environment.add_filter("tojson", _json)
        environment.globals.clear()  # no functions: a template reads its record, and nothing else
        try:
            self._template = environment.read(source)
        except TemplateError as error:
            raise UserError.one(f"{key} = {shorten(source)!r}", f"is not a template: {error}", _EXAMPLE) from None

    def text(self, record: Mapping[str, Any], place: str) -> str:
        """Return the text of ``record``.

        Raises:
            CorruptRecord: it lacks a field, or a field is not text.
        """
        fix = 'correct the template, or set data.on_corrupt = "skip"'
        try:
            return BoundedEnvironment.text(self._template, {"record": record, **record})
        except UndefinedError as error:
            fields = shorten(", ".join(map(str, record)))
            raise CorruptRecord(place, f"{self._key}: {error.message} in the record (fields: {fields})", fix) from None
        except TooMuch as error:
            raise CorruptRecord(place, f"{self._key}: the template is stopped: {error}", fix) from None
        except Exception as error:  # noqa: BLE001 - an operation on a value of an unexpected type raises anything
            raise CorruptRecord(place, f"{self._key}: {str(error) or type(error).__name__}", fix) from None


def _text(value: Any) -> Any:
    """Return what ``{{ value }}`` becomes a part of the text. ``null`` would silently become the word "None"."""
    if isinstance(value, str | int | float | Undefined) and not isinstance(value, bool):
        return value
    raise TemplateError(f"a value between braces is {json_kind(value)}, not text; name one of its parts, or use | tojson")


def _json(value: Any, indent: int | None = None) -> str:
    if isinstance(value, Undefined):
        str(value)  # raises UndefinedError
    return json.dumps(value, ensure_ascii=False, indent=indent)
