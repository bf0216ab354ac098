"""Reading a TorchTitan recipe of the last generation in TOML."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_core.api import Problem, UserError
from titan_core.toolkit.text import shorten, show
from titan_core.toolkit.toml import LONGEST, BadToml, parse_toml
from titan_torchtitan.rules import RULES, TYPES, last_name

_LARGE = 2**53
"""Larger integers are not exact as floats; the check of the new recipe refuses them."""


@dataclass(frozen=True)
class OldRecipe:
    """A TorchTitan recipe."""

    source: str
    written: Mapping[str, Any]
    """The keys that TorchTitan has, by dotted name, with their values as written."""
    given: Mapping[str, Any]
    """The same, with values as TorchTitan understood them: it also read lists from strings, and strings from numbers."""
    unknown: Mapping[str, Any]
    """Keys that TorchTitan never had."""


def read(path: str, titan: Collection[str] = ()) -> OldRecipe:
    """Read the TorchTitan recipe at ``path``.

    Args:
        titan: the keys of Titan's recipes.

    Raises:
        UserError: the file cannot be read, or :func:`from_document` refuses it.
    """
    try:
        return from_document(parse_toml(_text(path)), path, titan)
    except BadToml as error:
        where = path if error.line is None else f"{path}:{error.line}"
        raise UserError.one(where, str(error), "correct the file") from None


def from_document(document: Mapping[str, Any], path: str, titan: Collection[str] = ()) -> OldRecipe:
    """Return the recipe in a TOML document.

    Raises:
        UserError: the document is not a TorchTitan recipe, has names from before October 2025, or values of a wrong type.
    """
    flat = dict(_flattened(document))
    known = {name: value for name, value in flat.items() if name in RULES}
    older = {name: new for name in flat if (new := last_name(name)) is not None}
    only_titan = [
        name for name in flat if name not in (*known, *older) and (name in titan or name.startswith("model.args."))
    ]
    if only_titan and all(name in titan for name in (*known, *older)):
        name = only_titan[0]
        why = "is a key of Titan: the file is a Titan recipe already"
        raise UserError.one(f"{path}: {name} = {show(flat[name], name)}", why, f"use it: titan train {path}")
    if older:
        names = ", ".join(f"{name} (now {new})" if new else f"{name} (removed)" for name, new in older.items())
        why = f"is of a generation before October 2025, which Titan does not import: {names}"
        raise UserError.one(path, why, 'rename these keys first, and see docs/torchtitan.md, "Older recipes"')
    if not known:
        sections = ", ".join(f"[{name}]" for name in list(document)[:3]) or "no section"
        raise UserError.one(
            path, f"is not a TorchTitan recipe: it has {sections}, and none of TorchTitan's keys",
            "give a TOML file of TorchTitan's train_configs",
        )  # fmt: skip
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in known.items():
        try:
            given[name] = _typed(value, RULES[name].type)
        except ValueError as error:
            problems.append(Problem(f"{path}: {name} = {show(value, name)}", str(error), "correct the value"))
    if problems:
        raise UserError(*problems)
    return OldRecipe(path, known, given, {name: value for name, value in flat.items() if name not in known})


def _text(path: str) -> str:
    if path.endswith(".py"):
        why = "is Python: TorchTitan's recipes are TOML until the end of 2025, and Python functions since"
        raise UserError.one(path, why, "give a TOML recipe, or write a Titan recipe with the same values")
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(LONGEST + 1)  # one byte more than allowed: the file may be endless, such as a device
        if len(content) > LONGEST:
            raise UserError.one(shorten(path), f"is longer than {LONGEST:,} bytes", "give a recipe")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError.one(path, f"is not UTF-8 text ({error.reason} at byte {error.start})", "save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: not a possible file name
        reason = getattr(error, "strerror", None) or error
        raise UserError.one(shorten(path), f"cannot be read: {reason}", "check the path") from None


def _flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _flattened(value, f"{key}.")
        elif value != {}:
            yield key, value


def _typed(value: Any, kind: str) -> Any:
    """Return ``value`` as a value of the type ``kind``.

    Raises:
        ValueError: it has another type.
    """
    if kind == "list" and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if kind == "str" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    words, wanted, item = TYPES[kind]
    fits = isinstance(value, wanted) and (not isinstance(value, bool) or kind in ("bool", "any"))
    if not fits or (kind != "any" and isinstance(value, list) and not all(isinstance(entry, item) for entry in value)):
        raise ValueError(f"must be {words}")
    return float(value) if kind == "float" and abs(value) < _LARGE else value
