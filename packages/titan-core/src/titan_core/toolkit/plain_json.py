"""JSON files that must hold an object, and values that survive JSON."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from titan_core.api import UserError


def read_object(file: Path, fix: str) -> dict[str, Any]:
    """Return the JSON object in ``file``.

    Args:
        fix: the fix for a missing or damaged file, for the error.

    Raises:
        UserError: the file cannot be read, is not JSON, or holds something other than an object.
    """
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):  # a pipe or a device might never end
            raise OSError(errno.EINVAL, "it is not a regular file")
        contents = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError.one(str(file), "no such file", fix) from None
    except OSError as error:
        raise UserError.one(str(file), f"cannot be read: {error.strerror or error}", "check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise UserError.one(str(file), f"is not JSON: {error}", fix) from None
    if not isinstance(contents, dict):
        raise UserError.one(str(file), f"contains {json_kind(contents)}, not an object", fix)
    return contents


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
