"""``titan recipes``."""

from __future__ import annotations

from titan_core.api.components import Recipe
from titan_core.api.tools.output import print_json, print_table
from titan_core.cli.invocation import Invocation


def run(context: Invocation) -> int:
    """List the recipes of all plugins."""
    arguments = context.arguments
    registry = context.registry
    recipes = [(one.name, registry.owner(one).distribution, one.summary) for one in registry.all(Recipe)]
    if arguments.json:
        print_json([{"name": name, "distribution": owner, "summary": summary} for name, owner, summary in recipes])
    else:
        print_table(("recipe", "distribution", "what"), recipes)
    return 0
