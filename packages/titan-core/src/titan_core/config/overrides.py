"""Overrides: ``--section.key VALUE`` on the command line, and typed values from Python."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from titan_core.api._shown import shorten
from titan_core.api.config.resolved import COMMAND_LINE, Override
from titan_core.api.config.toml import BadToml, parse_toml

OVERRIDES = "overrides"
"""Origin of a value that a :class:`TypedOverride` set."""


@dataclass(frozen=True)
class TypedOverride:
    """An override by a value of Python."""

    key: str
    """Dotted, as in :class:`Override`."""
    value: Any


AnyOverride = Override | TypedOverride


def where_of(override: AnyOverride) -> str:
    """Return the origin of an override, for error messages."""
    return f"{OVERRIDES}: {override.key}" if isinstance(override, TypedOverride) else f"{COMMAND_LINE}: --{override.key}"


def given_value(override: AnyOverride, cls: type[BaseModel] | None, field: str) -> Any:
    """Return the value of an override for ``field`` of ``cls``."""
    return override.value if isinstance(override, TypedOverride) else value_of(override.text, cls, field)


def value_of(text: str, cls: type[BaseModel] | None, field: str) -> Any:
    """Return ``text`` as a value for ``field`` of ``cls``: a TOML value if the field accepts it, else the text itself.

    If the field accepts neither, the TOML value is returned, which later validation rejects.
    """
    as_toml = _toml_value(text)
    info = cls.model_fields.get(field) if cls is not None else None
    if info is None:
        return as_toml
    adapter: TypeAdapter[Any] = TypeAdapter(info.annotation or Any)
    candidates = [None, as_toml, text] if text.lower() == "none" else [as_toml, text]
    for candidate in candidates:
        try:
            adapter.validate_python(candidate, strict=True)
        except ValidationError:
            continue
        return candidate
    return as_toml


def _toml_value(text: str) -> Any:
    try:
        document = parse_toml(f"value = {text}")
    except BadToml:
        return text
    return document["value"] if len(document) == 1 else text  # a text of several lines may contain further keys


def without_dashes(argument: str, sections: Container[str]) -> str:
    """Return the fix for an override without its dashes (``training.steps=5``); empty if ``argument`` is none."""
    key, equals, _ = argument.partition("=")
    section, dot, _ = key.partition(".")
    return f"write overrides as --{shorten(argument)}" if equals and dot and section in sections else ""
