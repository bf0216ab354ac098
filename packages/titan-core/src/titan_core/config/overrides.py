"""``--section.key value`` on the command line."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from titan_core.api.tools.toml import BadToml, parse_toml


def value_of(text: str, cls: type[BaseModel] | None, field: str) -> Any:
    """``text`` as a value of ``cls``'s ``field``: a TOML value where that fits the field's type, else the text itself.

    A value that fits neither way comes back as TOML reads it, and is refused by the validation that follows.
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
    return document["value"] if len(document) == 1 else text  # a text of several lines may hold further keys
