"""What no value of a config may be, whatever key it stands under and whichever plugin owns the key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from titan_core.api.numbers import LARGEST

DEEPEST = 16
"""Tables and lists within one another."""
LONGEST_TEXT = 65_536
"""Characters in one value."""


def require_sane(value: Any) -> None:
    """Refuse numbers that are not finite, and texts and nesting that nothing can work with, anywhere in ``value``.

    Raises:
        ValueError: saying what is wrong, and where inside ``value``.
    """
    _raise_first(_flaws(value, "", 0, _not_finite))


def require_64_bits(value: Any) -> None:
    """Refuse numbers that do not fit 64 bits, anywhere in ``value``, which is sane otherwise. Apart from
    :func:`require_sane`, so that a field can report its own, tighter bound first.

    Raises:
        ValueError: saying where inside ``value``.
    """
    _raise_first(_flaws(value, "", 0, _too_large))


def _raise_first(flaws: Iterator[str]) -> None:
    flaw = next(flaws, None)
    if flaw is not None:
        raise ValueError(flaw)


def _flaws(value: Any, path: str, depth: int, of_number: Callable[[float], str]) -> Iterator[str]:
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        flaw = of_number(value)
    elif isinstance(value, str):
        flaw = _flaw_of_text(value)
    elif isinstance(value, Mapping | list | tuple):
        if depth >= DEEPEST:
            yield f"tables and lists may be nested {DEEPEST} deep"
            return
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, str) and (flaw := _flaw_of_text(key)):
                    yield f"a key inside it {flaw}"
            items = [(f"{path}.{key}" if path else str(key), one) for key, one in value.items()]
        else:
            items = [(f"{path}[{number}]", one) for number, one in enumerate(value)]
        for inner, one in items:
            yield from _flaws(one, inner, depth + 1, of_number)
        return
    else:
        return
    if flaw:
        yield f"{path} {flaw}" if path else flaw


def _not_finite(value: float) -> str:
    return "must be a finite number" if isinstance(value, float) and not math.isfinite(value) else ""


def _too_large(value: float) -> str:
    return "" if abs(value) <= LARGEST else f"must be at most {LARGEST:.2g} in size"


def _flaw_of_text(text: str) -> str:
    if len(text) > LONGEST_TEXT:
        return f"must be at most {LONGEST_TEXT} characters long"
    if "\0" in text:
        return "must not contain the character NUL"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "must be valid Unicode text (it holds bytes that are not UTF-8)"
    return ""
