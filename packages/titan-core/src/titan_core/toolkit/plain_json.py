"""JSON files that must hold an object, and values that survive JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titan_core.api import UserError
from titan_core.toolkit.files import LONGEST, read_bytes


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
        contents = parse_json(read_bytes(file, longest=longest, inside=inside))
    except FileNotFoundError:
        raise UserError.one(str(file), "no such file", fix) from None
    except OSError as error:
        raise UserError.one(str(file), f"cannot be read: {error.strerror or error}", "check its permissions") from None
    except ValueError as error:
        raise UserError.one(str(file), f"is not JSON: {error}", fix) from None
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
        raise ValueError("its lists and objects are nested too deeply") from None


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
