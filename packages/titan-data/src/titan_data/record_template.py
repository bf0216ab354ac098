"""Templates of a record's fields (``data.format``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_core.api import CorruptRecord, UserError
from titan_core.toolkit.text import shorten
from titan_data.template_process import SandboxedTemplate, TemplateRefused, UndefinedName

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
