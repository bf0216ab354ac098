"""Reading a TorchTitan recipe: its keys under their last names, and the generation that it belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_core.api.errors import Problem, UserError
from titan_core.api.tools.shown import shorten, show
from titan_core.api.tools.toml import LONGEST, BadToml, parse_toml
from titan_torchtitan.keys import ALIASES, KEYS, LATE, SHARED, TITAN_ONLY, TORCHTRAIN, Generation, Kind

_LARGE = 2**53
"""Larger integers are not exact as floats; the check of the new recipe refuses them."""
_FLAG = re.compile(r"\s*(?:\S*torchrun\b.*|.*\s)?--[a-z_0-9]+\.[a-z_0-9.-]+(\s|=|\\|$)")
_KINDS: dict[Kind, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "list": (list,), "ranks": (list,),
    "any": (object,),
}  # fmt: skip
_ELEMENTS: dict[Kind, type] = {"list": str, "ranks": int}
_WORDS: dict[Kind, str] = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string", "list": "a list of strings",
    "ranks": "a list of whole numbers",
}  # fmt: skip


@dataclass(frozen=True)
class Given:
    """A key as the recipe has it."""

    name: str
    """Its dotted name."""
    value: Any
    """Its value, as written."""
    meaning: Any
    """The value that the last name of the key would have."""


@dataclass(frozen=True)
class OldRecipe:
    """A TorchTitan recipe."""

    source: str
    generation: Generation
    given: Mapping[str, tuple[Given, ...]]
    """The keys, by their last name. Earlier names for one key, if the recipe uses several, have the same meaning."""
    unknown: Mapping[str, Any]
    """Keys that TorchTitan never had, by dotted name."""

    def has(self, key: str) -> bool:
        """Whether the recipe sets ``key``, under any of its names."""
        return key in self.given

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default`` if the recipe does not set it."""
        assert key in KEYS, key
        return self.given[key][0].meaning if key in self.given else default

    def names(self) -> set[str]:
        """Return the names of all keys as written."""
        return {given.name for names in self.given.values() for given in names}


def read(path: str) -> OldRecipe:
    """Read the TorchTitan recipe at ``path``.

    Raises:
        UserError: the file cannot be read, or :func:`from_document` refuses it.
    """
    return from_document(_parse(_text(path), path), path)


def from_document(document: Mapping[str, Any], path: str) -> OldRecipe:
    """Return the recipe in a TOML document.

    Raises:
        UserError: the document is not a TorchTitan recipe, has a value of a wrong type, or uses two names of one key with
            different values.
    """
    flat = dict(_flattened(document))
    known = {name for name in flat if name in KEYS or name in ALIASES}
    titan = sorted(name for name in flat if name in TITAN_ONLY or name.startswith("model.args."))
    if titan and not any(_only_torchtitan(name) for name in known):
        where = f"{path}: {titan[0]} = {show(flat[titan[0]], titan[0])}"
        raise UserError.one(where, "is a key of Titan: the file is a Titan recipe already", f"use it: titan train {path}")
    if not known:
        sections = ", ".join(f"[{name}]" for name in list(document)[:3]) or "no section"
        raise UserError.one(
            path, f"is not a TorchTitan recipe: it has {sections}, and none of TorchTitan's keys",
            "give a TOML file of TorchTitan's train_configs",
        )  # fmt: skip
    given: dict[str, list[Given]] = {}
    problems: list[Problem] = []
    for name in flat:
        if name not in known:
            continue
        alias = ALIASES.get(name)
        key = alias.key if alias else name
        kind = (alias.kind if alias else None) or KEYS[key].kind
        try:
            value = _typed(flat[name], kind)
        except ValueError as error:
            problems.append(Problem(f"{path}: {name} = {show(flat[name], name)}", str(error), "correct the value"))
            continue
        meaning = alias.convert(value) if alias and alias.convert else value
        given.setdefault(key, []).append(Given(name, flat[name], meaning))
    problems += _contradictions(path, given)
    if problems:
        raise UserError(*problems)
    unknown = {name: value for name, value in flat.items() if name not in known}
    return OldRecipe(path, _generation(flat), {key: tuple(names) for key, names in given.items()}, unknown)


def _text(path: str) -> str:
    file = Path(path)
    if file.suffix == ".py":
        why = "is Python: TorchTitan's recipes are TOML until the end of 2025, and Python functions since"
        raise UserError.one(path, why, "give a TOML recipe, or write a Titan recipe with the same values")
    try:
        with file.open("rb") as stream:
            content = stream.read(LONGEST + 1)  # one byte more than allowed: the file may be endless, such as a device
        if len(content) > LONGEST:
            raise UserError.one(shorten(path), f"is longer than {LONGEST:,} bytes", "give a recipe")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError.one(path, f"is not UTF-8 text ({error.reason} at byte {error.start})", "save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: not a possible file name
        reason = getattr(error, "strerror", None) or error
        raise UserError.one(shorten(path), f"cannot be read: {reason}", "check the path") from None


def _parse(text: str, path: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except BadToml as error:
        flag = next((number for number, line in enumerate(text.splitlines(), 1) if _FLAG.match(line)), None)
        if flag is not None:
            why = "is a command-line flag of TorchTitan, and a recipe is TOML"
            raise UserError.one(
                f"{path}:{flag}", why, "write [section] and key = value, or import its --job.config_file"
            ) from None
        where = path if error.line is None else f"{path}:{error.line}"
        raise UserError.one(where, str(error), "correct the file") from None


def _flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _flattened(value, f"{key}.")
        elif value != {}:
            yield key, value


def _only_torchtitan(name: str) -> bool:
    """Whether a key of TorchTitan cannot be a key of Titan: an earlier name, or one of another section."""
    return name in ALIASES.keys() - SHARED or name.partition(".")[0] in (
        "experimental", "debug", "memory_estimation", "quantize", "liger_kernel",
    ) or name in (
        "model.converters", "model.hf_assets_path", "model.norm_type", "fault_tolerance.semi_sync_method",
    )  # fmt: skip


def _typed(value: Any, kind: Kind) -> Any:
    """Return ``value`` as ``kind``. Lists may be strings with commas, and strings numbers: TorchTitan accepted both.

    Raises:
        ValueError: it has another type.
    """
    if kind == "list" and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if kind == "str" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    fits = isinstance(value, _KINDS[kind]) and (not isinstance(value, bool) or kind in ("bool", "any"))
    if not fits or (kind in _ELEMENTS and not all(isinstance(item, _ELEMENTS[kind]) for item in value)):
        raise ValueError(f"must be {_WORDS[kind]}")
    return float(value) if kind == "float" and abs(value) < _LARGE else value


def _contradictions(path: str, given: Mapping[str, list[Given]]) -> Iterator[Problem]:
    for names in given.values():
        first = names[0]
        for other in names[1:]:
            if other.meaning != first.meaning:
                where = f"{path}: {first.name} = {show(first.value)} and {other.name} = {show(other.value)}"
                yield Problem(where, "are two names of one key with different values", "keep one of them")


def _generation(flat: Mapping[str, Any]) -> Generation:
    """Return the latest generation whose names occur, or else the first that removed one of them."""
    aliases = [ALIASES[name] for name in flat if name in ALIASES]
    since = max([alias.since for alias in aliases] + [KEYS[name].since for name in flat if name in KEYS])
    if since > TORCHTRAIN:
        return since
    paths = (value for value in flat.values() if isinstance(value, str))
    if any("torchtrain/" in value for value in paths) or flat.get("model.name") == "llama":
        return TORCHTRAIN
    return min((alias.until for alias in aliases), default=LATE)
