"""TorchTitan recipes, written and imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli
import tomli_w

from titan_torchtitan.importing import import_recipe
from titan_torchtitan.outcome import ImportOutcome
from titan_torchtitan.reading import from_document

RECIPE = Path(__file__).parents[1] / "torchtitan" / "recipe.toml"
"""A recipe with nearly every key that TorchTitan had at last."""


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of dotted keys."""
    document: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        table = document
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return document


def changed(file: Path, changes: dict[str, Any]) -> Path:
    """Write :data:`RECIPE` with changed keys; ``None`` removes a key."""
    document = tomli.loads(RECIPE.read_text())
    for key, value in changes.items():
        *path, name = key.split(".")
        table = document
        for part in path:
            table = table.setdefault(part, {})
        if value is None:
            del table[name]
        else:
            table[name] = value
    file.write_text(tomli_w.dumps(document))
    return file


def imported(flat: dict[str, Any]) -> ImportOutcome:
    """Import a recipe with these dotted keys."""
    return import_recipe(from_document(nested(flat), "old.toml"), ["llama3"])
