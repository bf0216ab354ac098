"""The places of stored models: local paths, and names that a hub knows. Free of torch."""

from __future__ import annotations

import re
from pathlib import Path
from shlex import quote
from typing import Final

from titan_core.api import ModelHub, Problem, Recipe, Registry, UserError
from titan_core.toolkit.errors import nearest_path

NAME_ON_HUB: Final = re.compile(r"[\w.-]+/[\w.-]+")


def located(path: str, registry: Registry) -> str:
    """Return the folder of a model that a hub knows by the name ``path``; otherwise ``path``, with ``~`` expanded.

    Raises:
        UserError: the name is that of a model which this machine does not have.
    """
    local = Path(path).expanduser()
    if path in [recipe.name for recipe in registry.all(Recipe)] and not local.exists():
        fix = f"train it first (`titan train {quote(str(path))}`), and give the run's directory, by default outputs/{path}"
        raise UserError.one(path, "is a recipe, not a trained model", fix)
    try:
        exists = local.exists()
    except OSError:  # such as a name that is too long
        exists = False
    if exists or not NAME_ON_HUB.fullmatch(path):
        return path if "://" in path else str(local)
    hubs = registry.all(ModelHub)
    if not hubs:
        why = "does not exist, and no installed plugin finds models by name"
        raise UserError.one(path, why, "check the path, or install titan-data")
    problems: list[Problem] = []
    for hub in hubs:
        try:
            return hub.locate.load()(path)
        except UserError as error:
            problems += error.problems
    if local.parent.is_dir():  # more likely a path than the name of a model
        why = "does not exist, and no installed plugin knows a model of this name"
        raise UserError.one(path, why, nearest_path(str(local)))
    raise UserError(*problems)
