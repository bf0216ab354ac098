"""Rendering of a config as TOML and as help text."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from titan_core.api.config import Config
from titan_core.api.section import Section
from titan_core.api.tools.secrets import redact
from titan_core.api.tools.shown import show
from titan_core.config.docs import field_docs


def to_toml(config: Config) -> str:
    """Return the resolved config, with every section and key, as TOML that resolves to the same config.

    Secrets are removed, because no output may contain them. The recipe is rejected until they are set again.
    """
    import tomli_w  # needed only here, and every command imports this module

    return tomli_w.dumps(redact(config.as_dict()))


def describe_options(sections: Mapping[str, Sequence[type[Section]]], width: int = 100) -> str:
    """Return the ``--help`` text of all keys: types, defaults and documentation."""
    import textwrap

    lines = ["config overrides (--section.key VALUE):"]
    for name, owners in sections.items():
        lines += ["", f"[{name}]"]
        docs = {key: text for cls in owners for key, text in field_docs(cls).items()}
        for key, field in ((key, field) for cls in owners for key, field in cls.model_fields.items()):
            default = field.get_default(call_default_factory=True)
            shown = "" if default is None or default == "" else f" (default {show(default)})"
            lines.append(f"  --{name}.{key} {type_name(field.annotation)}")
            text = f"{docs.get(key, '')}{shown}"
            lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def type_name(annotation: Any) -> str:
    """Return a readable name of a type for help texts."""
    if annotation in (type(None), None):
        return "none"
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return type_name(get_args(annotation)[0])
    if origin is Literal:
        return "|".join(map(str, get_args(annotation)))
    if origin in (typing.Union, types.UnionType):
        return "|".join(type_name(argument) for argument in get_args(annotation))
    if origin is list:
        return f"[{type_name(get_args(annotation)[0])}, ...]"
    if origin is dict:
        return "{...}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return str(getattr(annotation, "__name__", annotation))
