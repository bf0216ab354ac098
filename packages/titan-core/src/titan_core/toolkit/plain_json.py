"""JSON that others may have written, and values that survive JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from titan_core.api import UserError
from titan_core.api.config.toml import number_flaw as number_flaw
from titan_core.toolkit.files import LONGEST, read_bytes

DEEPEST = 100
"""Levels of lists and objects in :func:`plain_json`."""
LARGEST = 10**300
"""Largest integer in :func:`plain_json`. Larger ones cannot be compared with floats."""
_SUSPICIOUS = re.compile(rb"[0-9]{301}|\\u[dD][89a-fA-F]")
"""What large numbers and surrogates contain; few files do, and only their values are looked at one by one."""


class TooDeep(ValueError):
    """Lists and objects are nested too deeply."""


def read_object(file: Path, fix: str, *, longest: int = LONGEST, inside: Path | None = None) -> dict[str, Any]:
    """Return the JSON object in ``file``.

    Args:
        fix: the fix for a missing or damaged file, for the error.
        longest: bytes that the file may have.
        inside: the folder that must contain the file; see :func:`~titan_core.toolkit.files.open_file`.

    Raises:
        UserError: the file cannot be read, is not JSON, or holds something other than an object.
    """
    try:
        contents = plain_json(read_bytes(file, longest=longest, inside=inside))
    except FileNotFoundError:
        raise UserError.one(str(file), "no such file", fix) from None
    except OSError as error:
        raise UserError.one(
            str(file), f"cannot be read: {error.strerror or error}", "check the file, and its permissions"
        ) from None
    except ValueError as error:
        why = "is not JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else "cannot be used"
        raise UserError.one(str(file), f"{why}: {error}", fix) from None
    if not isinstance(contents, dict):
        raise UserError.one(str(file), f"contains {json_kind(contents)}, not an object", fix)
    return contents


def parse_json(text: str | bytes) -> Any:
    """Return the value that ``text`` represents.

    Raises:
        ValueError: it is not JSON or UTF-8, or is nested more deeply than Python can represent.
    """
    try:
        # The json module guesses at the encoding of bytes, and UTF-16 has line ends within characters.
        return json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError:
        raise TooDeep("its lists and objects are nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        raise ValueError(number_flaw(error)) from None


def plain_json(text: bytes) -> Any:
    """Return the value that ``text`` represents, if other programs can use it: its numbers can be computed with, its texts
    can be written to a file, and its nesting is no deeper than :data:`DEEPEST`.

    Raises:
        ValueError: it is not JSON or UTF-8, or a value cannot be used.
    """
    value = parse_json(text)
    level = [value]
    for _ in range(DEEPEST):
        items = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [item for each in items for item in each if isinstance(item, dict | list)]
    if level:
        raise TooDeep("its lists and objects are nested too deeply")
    if _SUSPICIOUS.search(text):
        _require_plain(value, "")
    return value


def _require_plain(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _require_plain(key, "a key")
            _require_plain(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _require_plain(item, f"{place}[{number}]")
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{place} is an integer of {value.bit_length():,} bits")
    elif isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        raise ValueError(f"{place} has half of a surrogate pair, which is no character")


def json_kind(value: object) -> str:
    """Return JSON's word for a value, with an article: ``"a string"``, ``"null"``; for other values the Python type."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def survives_json(value: object) -> bool:
    """Whether JSON preserves ``value``."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
