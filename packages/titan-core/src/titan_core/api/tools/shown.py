"""Values as errors and tables show them: short, and without secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from titan_core.api.numbers import LARGEST
from titan_core.api.sane_values import DEEPEST
from titan_core.api.tools.secrets import LEFT_OUT, is_secret, text_without_secrets

LONGEST_SHOWN = 200
"""Characters of a value in an error."""


def shorten(text: str) -> str:
    """``text``, without its middle where it is longer than a reader wants."""
    half = LONGEST_SHOWN // 2
    return text if len(text) <= LONGEST_SHOWN else f"{text[:half]}...{text[-half:]}"


def show(value: Any, key: str = "") -> str:
    """A value as one would write it in TOML, for an error: no longer than a reader wants, and without what is secret by
    the name of its ``key`` or by its form."""
    return shorten(_show(value, is_secret(key), depth=0))


def _show(value: Any, hide: bool, depth: int) -> str:
    if depth > DEEPEST:
        return "..."
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        shown = (f"{key} = {_show(one, hide or is_secret(str(key)), depth + 1)}" for key, one in value.items())
        return "{" + ", ".join(shown) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_show(one, hide, depth + 1) for one in value) + "]"
    if hide and value is not None and value != "" and not isinstance(value, bool):
        return json.dumps(LEFT_OUT)
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print very long ones
    if isinstance(value, str):
        value = text_without_secrets(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return repr(value)
