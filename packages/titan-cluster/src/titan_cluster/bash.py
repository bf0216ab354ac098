"""Scripts whose values no shell interprets: a head of quoted assignments, and a body that never changes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from importlib.resources import files

Value = str | int | Iterable[str]


def script(values: Mapping[str, Value], *bodies: str) -> str:
    """Return the assignments of ``values``, and then scripts of this package that read them.

    Args:
        values: by name; a list becomes an array.
        bodies: file names of the scripts.
    """
    # Shellcheck warns of values that look like expansions, escapes or mistyped quotes, and are none.
    head = [
        "# shellcheck disable=SC1003,SC1110,SC1111,SC1112,SC2016",
        *(_assignment(name, value) for name, value in values.items()),
    ]
    return "\n".join([*head, "", script_text(*bodies)])


def script_text(*names: str) -> str:
    """Return the text of a script of this package, or of several as one."""
    folder = files("titan_cluster").joinpath("scripts")
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _assignment(name: str, value: Value) -> str:
    if isinstance(value, str | int):
        return f"{name}={shlex.quote(str(value))}"
    items = [f"    {shlex.quote(item)}" for item in value]
    return "\n".join([f"{name}=(", *items, ")"]) if items else f"{name}=()"
