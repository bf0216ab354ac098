"""``titan recipes``."""

from __future__ import annotations

from titan_core.api.components import Recipe
from titan_core.api.tools.output import print_json, print_table
from titan_core.cli.invocation import Invocation


def run(context: Invocation) -> int:
    """List the recipes of all plugins."""
    arguments = context.arguments
    registry = context.registry
    recipes = registry.all(Recipe)
    owners = [registry.owner(one).distribution for one in recipes]
    if arguments.json:
        listing = [
            {"name": one.name, "distribution": owner, "summary": one.summary, "default": one.default}
            for one, owner in zip(recipes, owners, strict=True)
        ]
        print_json(listing)
    else:
        rows = [
            (f"{one.name} (default)" if one.default else one.name, owner, one.summary)
            for one, owner in zip(recipes, owners, strict=True)
        ]
        print_table(("recipe", "distribution", "what"), rows)
    return 0
