"""Extracts the text of a record: one of its fields, or what ``data.format`` (a template, or a plugin's function) makes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from titan_core.api import CorruptRecord, DatasetContext, Document, Problem, UserError
from titan_core.toolkit.errors import PluginFailure
from titan_core.toolkit.plain_json import json_kind, parse_json
from titan_core.toolkit.reading import FormatSpec
from titan_core.toolkit.text import shorten
from titan_data.template_process import SandboxedTemplate, TemplateRefused, UndefinedName

Reader: TypeAlias = Callable[[Any, str], Document]
"""(record, its place for error messages) -> document; raises :class:`~titan_core.api.CorruptRecord`."""

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
    _require_object(record, place)
    if context.format is not None:
        text = _formatted(record, context.format, place)
        if not isinstance(text, str):
            raise CorruptRecord(
                place, f"{_named(context.format)} returned {type(text).__name__}, not text", "fix the format"
            )
        return text
    text = record.get(context.text_field)
    if isinstance(text, str):
        return text
    if context.text_field not in record:
        raise CorruptRecord(place, missing_field(context.text_field, record), FIELD_FIX)
    raise CorruptRecord(place, f"field {context.text_field!r} contains {json_kind(text)}, not text")


def converted(record: Any, context: DatasetContext[Any], place: str) -> Any:
    """Return ``record``, or the record that the format makes of it; a template writes it as JSON.

    Raises:
        CorruptRecord: the format cannot convert it.
    """
    if context.format is None:
        return record
    _require_object(record, place)
    made = _formatted(record, context.format, place)
    if context.format.convert is not None:
        return made
    try:
        return parse_json(made)
    except ValueError as error:
        fix = 'write a JSON object, such as {"prompt": {{ question | tojson }}, "completion": {{ answer | tojson }}}'
        raise CorruptRecord(place, f"{_named(context.format)} made a text that is not JSON: {error}", fix) from None


def format_fields(spec: FormatSpec) -> tuple[str, ...] | None:
    """Return the names of the fields that a format may read; ``None``: all.

    Raises:
        UserError: it is no template.
    """
    return None if spec.convert is not None else _template(spec).fields


def parsed_record(content: bytes, place: str) -> Any:
    """Return the record that a line of JSON contains.

    Raises:
        CorruptRecord: it contains none.
    """
    try:
        return parse_json(content)
    except UnicodeDecodeError as error:
        why = f"not UTF-8 text: {error.reason} at byte {error.start} of the line"
        raise CorruptRecord(place, why, "convert the file to UTF-8") from None
    except ValueError as error:
        raise CorruptRecord(place, f"not a JSON record: {error}", "each line must be one JSON object") from None


def check_format(context: DatasetContext[Any]) -> list[Problem]:
    """Check that the format's function can be loaded, or that its template is one."""
    if context.format is None:
        return []
    try:
        if context.format.convert is None:
            _template(context.format)
        else:
            context.format.convert.load()
    except UserError as error:
        return list(error.problems)
    return []


def _require_object(record: Any, place: str) -> None:
    if not isinstance(record, Mapping):
        raise CorruptRecord(place, f"a record must be a JSON object, not {json_kind(record)}")


def _formatted(record: Mapping[str, Any], spec: FormatSpec, place: str) -> Any:
    if spec.convert is None:
        return _template(spec).text(record, place)
    try:
        return _function(spec)(record)
    except PluginFailure as error:  # the cause may be the record or the function
        problem = error.problems[0]
        raise CorruptRecord(place, f"{problem.where}: {problem.why}", problem.fix) from error


def _named(spec: FormatSpec) -> str:
    return f"the template in {spec.key}" if spec.convert is None else f"format {spec.text!r}"


@functools.cache
def _function(spec: FormatSpec) -> Callable[[Mapping[str, Any]], Any]:
    """Import the function once, not for each record."""
    assert spec.convert is not None
    return spec.convert.load()


@functools.cache
def _template(spec: FormatSpec) -> RecordTemplate:
    from titan_data.records import RecordTemplate

    return RecordTemplate(spec.text, spec.key)


_EXAMPLE = 'write fields between braces, as in "{{ question }} {{ answer }}"'
_FIX = 'correct the template, or set data.on_corrupt = "skip"'


class RecordTemplate:
    """A template whose variables are the fields of a record; ``record`` is the record itself (``record["my field"]``)."""

    def __init__(self, source: str, key: str) -> None:
        """
        Args:
            key: the config key that contains ``source``, for error messages.

        Raises:
            UserError: ``source`` is not a template, or takes too long to read.
        """
        self._key = key
        try:
            self._template = SandboxedTemplate("record", source, key)
        except TemplateRefused as error:
            raise UserError.one(f"{key} = {shorten(source)!r}", f"is not a template: {error}", _EXAMPLE) from None

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The names of the fields that it may read; ``None``: all."""
        return None if "record" in self._template.names else tuple(self._template.names)

    def text(self, record: Mapping[str, Any], place: str) -> str:
        """Return the text of ``record``.

        Raises:
            CorruptRecord: it lacks a field, or a field is not text.
            UserError: it takes too long, or too much memory.
        """
        read = record if self.fields is None else {name: record[name] for name in self.fields if name in record}
        try:
            text: str = self._template.render(read, place)["text"]
        except UndefinedName as error:
            fields = shorten(", ".join(map(str, record)))
            raise CorruptRecord(place, f"{self._key}: {error} in the record (fields: {fields})", _FIX) from None
        except TemplateRefused as error:
            raise CorruptRecord(place, f"{self._key}: {error}", _FIX) from None
        return text
