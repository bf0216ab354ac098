"""Damages bytes and JSON at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Place = tuple[Any, Any]
"""A container and the key or index of a value in it."""

WRONG: tuple[Any, ...] = ([], {}, None, "x", True, "\0", [[]], {"a": 1})
"""Values of several types, at least one of which is wrong anywhere in a manifest or a config."""


def damage_bytes(chance: random.Random, file: Path) -> str:
    """Damage ``file`` in a random way; return what was done."""
    data = bytearray(file.read_bytes())
    kind = chance.choice(["flipped", "cut", "longer", "empty", "garbage", "missing", "renamed"])
    at = chance.randrange(max(1, len(data)))
    match kind:
        case "flipped":
            data[at] ^= 1 << chance.randrange(8)
        case "cut":
            del data[at:]
        case "longer":
            data += bytes(chance.randrange(1, 9))
        case "empty":
            data.clear()
        case "garbage":
            data[:] = chance.randbytes(chance.randrange(1, 200))
        case "missing":
            file.unlink()
        case "renamed":
            file.rename(file.with_name("other" + file.suffix))
    if kind not in ("missing", "renamed"):
        file.write_bytes(data)
    return f"{file.name} {kind} at {at}"


def places(value: Any) -> Iterator[tuple[str, Place]]:
    """Yield every value inside ``value`` with its dotted path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield str(key), (value, key)
        for path, place in places(inner):
            yield f"{key}.{path}", place


def wrong_type(chance: random.Random, value: Any) -> Any:
    """Return a value of another type."""
    return chance.choice([wrong for wrong in WRONG if type(wrong) is not type(value)])
