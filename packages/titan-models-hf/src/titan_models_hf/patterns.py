"""Few patterns in place of many names: models repeat their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from titan_core.api import matches

V = TypeVar("V")


def by_pattern(values: Mapping[str, V], blocks: str) -> dict[str, V]:
    """Return the values of names by patterns, of which the first that matches a name has its value.

    Names within blocks (``model.layers.3.mlp.down_proj.weight``) share a pattern (``model.layers.*.mlp.down_proj.weight``)
    if they share the value.
    """
    shared: dict[str, list[V]] = {}
    for name, value in values.items():
        shared.setdefault(_pattern(name, blocks), []).append(value)
    found = {pattern: same[0] for pattern, same in shared.items() if all(one == same[0] for one in same)}
    # The longest first: a wildcard also matches dots.
    patterns = dict(sorted(found.items(), key=lambda item: -len(item[0])))
    single = {name: value for name, value in values.items() if _first(name, patterns) != value}
    used = {_matching(name, {**single, **patterns}) for name in values}
    return {pattern: value for pattern, value in {**single, **patterns}.items() if pattern in used}


def all_by_pattern(names: Iterable[str], everything: Iterable[str], blocks: str) -> tuple[str, ...]:
    """Return patterns that match ``names`` and none of ``everything`` besides."""
    wanted = set(names)
    found = by_pattern({name: name in wanted for name in everything}, blocks)
    chosen = [pattern for pattern, value in found.items() if value]
    exact = all(matches(name, chosen) == (name in wanted) for name in everything)
    return tuple(chosen) if exact else tuple(sorted(wanted))


def _pattern(name: str, blocks: str) -> str:
    inner = name.removeprefix(f"{blocks}.")
    number, dot, rest = inner.partition(".")
    return f"{blocks}.*.{rest}" if inner != name and dot and number.isdigit() else name


def _matching(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if matches(name, [pattern])), None)


def _first(name: str, values: Mapping[str, V]) -> V | None:
    pattern = _matching(name, values)
    return None if pattern is None else values[pattern]
