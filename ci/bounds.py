"""The lowest versions of all dependencies that the packages declare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ci.workspace import requirement_name

_FLOOR = re.compile(r">=\s*([\d.]+)")
_PINNED = re.compile(r"(?m)^([\w.-]+)(?:\[[^\]]*\])?==(\S+)")


def floors(requirements: Iterable[str]) -> dict[str, set[str]]:
    """Return the minimum versions in ``requirements`` by the name of the dependency."""
    found: dict[str, set[str]] = {}
    for requirement in requirements:
        floor = _FLOOR.search(requirement.partition(";")[0])
        if floor is not None:
            found.setdefault(requirement_name(requirement), set()).add(floor.group(1))
    return found


def lowest_versions(requirements: Iterable[str]) -> dict[str, str]:
    """Return the lowest version of each dependency that an installation of all ``requirements`` can have."""
    return {name: max(minima, key=numbers) for name, minima in floors(requirements).items()}


def unreachable(requirements: Iterable[str], pins: str) -> dict[str, str]:
    """Return the dependencies of which a resolution for the lowest versions chose none of the declared minima.

    Args:
        requirements: what the packages and their tests declare.
        pins: the resolution, as ``uv pip compile`` writes it.

    Returns:
        name -> the chosen version, for each dependency of which no declared minimum was chosen.
    """
    chosen: Mapping[str, str] = {requirement_name(name): version for name, version in _PINNED.findall(pins)}
    return {
        name: chosen[name]
        for name, minima in floors(requirements).items()
        if name in chosen and numbers(chosen[name]) not in map(numbers, minima)
    }


def numbers(version: str) -> list[int | str]:
    """Return the parts of ``version`` without a local part and trailing zeros: 2.1.0 is release 2.1.

    ``packaging`` is not at hand: `python -m ci` runs without an environment.
    """
    parts = re.sub(r"(\.0)+$", "", version.partition("+")[0]).split(".")
    return [int(part) if part.isdecimal() else part for part in parts]
