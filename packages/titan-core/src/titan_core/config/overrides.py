"""``--section.key value`` on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from titan_core.api.config import COMMAND_LINE, Override
from titan_core.api.errors import UserError
from titan_core.api.tools.toml import BadToml, parse_toml


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """``["--training.steps", "100", "--optimizer.lr=1e-3"]`` -> overrides.

    Raises:
        UserError: something that is not an override, or one without a value.
    """
    return list(_parse(iter(arguments)))


def _parse(arguments: Iterator[str]) -> Iterator[Override]:
    for argument in arguments:
        flag, equals, text = argument.partition("=")
        key = flag[2:].replace("-", "_")
        if not flag.startswith("--") or "." not in key:
            raise UserError.one(
                f"{COMMAND_LINE}: {argument}",
                "not an option of this command, nor an override of the config",
                "overrides are written --section.key VALUE; --help lists them",
            )
        if not equals:
            following = next(arguments, None)
            if following is None or following.startswith("--"):
                raise UserError.one(
                    f"{COMMAND_LINE}: {flag}", "a value is needed", f"write {flag} VALUE (booleans too: true or false)"
                )
            text = following
        yield Override(key, text)


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
