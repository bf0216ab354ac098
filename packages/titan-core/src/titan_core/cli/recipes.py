"""``titan recipes``."""

from __future__ import annotations

from titan_core.api import Recipe
from titan_core.cli.invocation import Invocation
from titan_core.cli.plugins import print_conflicts
from titan_core.toolkit.text import print_json, print_table


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
        print_conflicts(registry, Recipe)
    return 0
