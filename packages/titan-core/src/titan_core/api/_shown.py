"""Values as errors and tables show them: short and without secrets."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from titan_core.api.config._sane_values import DEEPEST
from titan_core.api.config.numbers import LARGEST
from titan_core.api.config.secrets import REDACTED, is_secret, redact_text

LONGEST_SHOWN = 200
"""Maximum characters of a value in an error."""
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def shorten(text: str) -> str:
    """Return ``text``, with its middle replaced by dots if it is too long."""
    half = LONGEST_SHOWN // 2
    return text if len(text) <= LONGEST_SHOWN else f"{text[:half]}...{text[-half:]}"


def printable(text: str) -> str:
    """Return ``text`` with tabs expanded and what a terminal would obey escaped: control characters other than newlines,
    changes of the writing direction, and surrogates, which no terminal can show."""
    escaped = (one.encode("unicode_escape").decode() if is_obeyed(one) else one for one in text)
    return "".join(escaped).expandtabs(4)


def is_obeyed(character: str) -> bool:
    """Whether a terminal would obey ``character`` instead of showing it, or cannot show it."""
    if character in "\n\t" or character.isprintable():
        return False
    # The other characters that are not printable are spaces and joiners, which scripts and emoji need.
    return unicodedata.category(character) in ("Cc", "Cs") or character in _DIRECTIONS


def show(value: Any, key: str = "") -> str:
    """Return ``value`` in TOML syntax for an error: shortened, and without values that are secret by the name of their
    ``key`` or by their form."""
    return shorten(_show(value, is_secret(key), depth=0))


def _show(value: Any, hide: bool, depth: int) -> str:
    if depth > DEEPEST:
        return "..."
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        shown = (f"{key} = {_show(item, hide or is_secret(str(key)), depth + 1)}" for key, item in value.items())
        return "{" + ", ".join(shown) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_show(item, hide, depth + 1) for item in value) + "]"
    if hide and value is not None and value != "" and not isinstance(value, bool):
        return json.dumps(REDACTED)
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print very long integers
    if isinstance(value, str):
        value = redact_text(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return repr(value)
