"""``titan recipes`` and ``titan recipe copy``."""

from __future__ import annotations

import argparse
from pathlib import Path

from titan_core.api.components import Recipe
from titan_core.api.errors import UserError
from titan_core.api.tools.output import print_json, print_table
from titan_core.cli.invocation import Invocation
from titan_core.config.commented import commented_copy

_LEAD = """\
# A copy of recipe {name}. The comments say what each key does, with its [type and default].
# `titan train --help` documents all other keys.
"""


def run(context: Invocation) -> int:
    """List the recipes of all plugins."""
    arguments = context.arguments
    registry = context.registry
    recipes = registry.all(Recipe)
    owners = [registry.owner(recipe).distribution for recipe in recipes]
    if arguments.json:
        listing = [
            {"name": recipe.name, "distribution": owner, "summary": recipe.summary, "default": recipe.default}
            for recipe, owner in zip(recipes, owners, strict=True)
        ]
        print_json(listing)
    else:
        rows = [
            (f"{recipe.name} (default)" if recipe.default else recipe.name, owner, recipe.summary)
            for recipe, owner in zip(recipes, owners, strict=True)
        ]
        print_table(("recipe", "distribution", "summary"), rows)
    return 0


def copy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan recipe copy``."""
    parser.add_argument("recipe_name", metavar="NAME", help="name of a recipe (see `titan recipes`)")
    parser.add_argument("file", metavar="FILE", type=Path, help="TOML file to write, such as my.toml")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def copy(context: Invocation) -> int:
    """Write a recipe to a file, with the documentation of each key as a comment.

    Raises:
        UserError: the recipe does not exist, or the file exists or cannot be written.
    """
    name, file, registry = context.arguments.recipe_name, context.arguments.file, context.registry
    if name not in registry.names(Recipe):
        raise UserError.one(f"recipe {name!r}", registry.unknown(Recipe), registry.suggest(Recipe, name))
    if file.suffix != ".toml":  # `titan train my` would look for a recipe of this name
        raise UserError.one(str(file), "must end in .toml", f"write to {file / name if file.is_dir() else file}.toml")
    text = f"{_LEAD.format(name=name)}\n{commented_copy(registry.get(Recipe, name), registry)}"
    try:
        with file.open("w" if context.arguments.force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UserError.one(str(file), "exists already", "add --force to overwrite it, or name another file") from None
    except OSError as error:
        raise UserError.one(str(file), f"cannot be written: {error.strerror or error}", "name another file") from None
    print(f"{file}: a copy of {name}; next: `titan config check {file}`, then `titan train {file}`")
    return 0
