"""Restrictions on every value of a config, regardless of its key and of the plugin that owns the key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel

from titan_core.api.config.numbers import LARGEST

DEEPEST = 16
"""Maximum nesting depth of tables and lists."""
LOCALE_FIX = "set LC_ALL=C.UTF-8, and unset PYTHONUTF8"
LONGEST_TEXT = 65_536
"""Maximum characters in one value."""


def require_sane(value: Any) -> None:
    """Refuse non-finite numbers, and text or nesting that cannot be processed, anywhere in ``value``.

    Raises:
        ValueError: says what is wrong, and where inside ``value``.
    """
    _raise_first(_flaws(value, "", 0, _not_finite))


def require_64_bits(value: Any) -> None:
    """Refuse numbers that do not fit into 64 bits, anywhere in ``value``. Separate from :func:`require_sane`, so that a
    field can report its own, tighter bound first.

    Raises:
        ValueError: says where inside ``value``.
    """
    _raise_first(_flaws(value, "", 0, _too_large))


def _raise_first(flaws: Iterator[str]) -> None:
    flaw = next(flaws, None)
    if flaw is not None:
        raise ValueError(flaw)


def _flaws(value: Any, path: str, depth: int, number_flaw: Callable[[float], str]) -> Iterator[str]:
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        flaw = number_flaw(value)
    elif isinstance(value, str):
        flaw = _text_flaw(value)
    elif isinstance(value, Mapping | list | tuple):
        if depth >= DEEPEST:
            yield f"tables and lists must not be nested more than {DEEPEST} deep"
            return
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, str) and (flaw := _text_flaw(key)):
                    yield f"a key inside it {flaw}"
            items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
        else:
            items = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
        for inner, item in items:
            yield from _flaws(item, inner, depth + 1, number_flaw)
        return
    else:
        return
    if flaw:
        yield f"{path} {flaw}" if path else flaw


def _not_finite(value: float) -> str:
    return "must be a finite number" if isinstance(value, float) and not math.isfinite(value) else ""


def _too_large(value: float) -> str:
    return "" if abs(value) <= LARGEST else f"must not exceed {LARGEST:.2g} in magnitude"


def _text_flaw(text: str) -> str:
    if len(text) > LONGEST_TEXT:
        return f"must be at most {LONGEST_TEXT} characters long"
    if "\0" in text:
        return "must not contain a NUL character"
    flaw = encoding_flaw(text)
    return f"must be valid Unicode ({flaw[0]}: {flaw[1]})" if flaw else ""


def encoding_flaw(text: str) -> tuple[str, str] | None:
    """Return why an argument, or the name of a file, is not valid Unicode, and what to do; ``None`` if it is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        with suppress(UnicodeError):
            text.encode(errors="surrogateescape").decode()
            return "its bytes are UTF-8, but the locale is not", LOCALE_FIX
        return "it contains bytes that are not UTF-8", "write it in UTF-8"
    return None
