"""``rules.toml``: what becomes of each key of TorchTitan's recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from titan_core.toolkit.toml import parse_toml

TYPES: Final[dict[str, tuple[str, type | tuple[type, ...], type]]] = {
    "bool": ("true or false", bool, object), "int": ("a whole number", int, object),
    "float": ("a number", (int, float), object), "str": ("a string", str, object),
    "list": ("a list of strings", list, str), "ranks": ("a list of whole numbers", list, int),
    "any": ("a value", object, object),
}  # fmt: skip
"""Types of values: words for errors, the type and that of a list's items."""


@dataclass(frozen=True)
class Rule:
    """What becomes of one key. ``rules.toml`` describes the fields."""

    type: str
    to: str
    """Titan's name of the key."""
    by: str = ""
    ignore: str = ""
    refuse: str = ""
    unless: Any = None
    when: str = ""


def _rules(blocks: list[dict[str, Any]]) -> Iterator[tuple[str, Rule]]:
    for block in blocks:
        action = {name: value for name, value in block.items() if name not in TYPES}
        for kind in block.keys() & TYPES.keys():
            for key in block[kind]:
                yield key, Rule(kind, to=block[kind][key] if isinstance(block[kind], dict) else key, **action)


_DATA = parse_toml((files("titan_torchtitan") / "rules.toml").read_text(encoding="utf-8"))
RULES: Final[dict[str, Rule]] = dict(_rules(_DATA["rule"]))
"""The rule of each key."""
_DEFAULTS: Final[dict[str, dict[str, Any]]] = _DATA["defaults"]


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a recipe and the defaults that it relies on and Titan does not have."""
    values = dict(given)
    for condition, defaults in _DEFAULTS.items():
        if holds(condition, values):
            values |= {key: value for key, value in defaults.items() if values.get(key, "") == ""}
    return values


def holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Whether the values of a recipe fulfil a condition of ``rules.toml``: a key that is on, or ``key=value``."""
    key, _, wanted = condition.partition("=")
    value = values.get(key)
    if wanted:
        return value == wanted or (isinstance(value, list) and wanted in value)
    return bool(value) or not condition


def last_name(key: str) -> str | None:
    """Return the last name of a key that TorchTitan had before October 2025: empty if it removed the key, ``None`` if it
    never had it or has it still."""
    if key in RULES or key in _DATA["older"]:
        return None if key in RULES else str(_DATA["older"][key])
    moved = (new + key.removeprefix(old) for old, new in _DATA["moved"].items() if key.startswith(old))
    return next((name for name in moved if name in RULES), None)
