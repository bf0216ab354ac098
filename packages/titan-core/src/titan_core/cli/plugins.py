"""``titan plugins`` and ``titan recipes``."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, cast

import importlib_metadata

from titan_core.api import CheckResult, Component, Health, HealthContext, Recipe
from titan_core.cli.invocation import Invocation
from titan_core.plugins.discovery import DISABLE_VARIABLE
from titan_core.plugins.registry import Components
from titan_core.toolkit.text import print_json, print_table, say


def run(context: Invocation) -> int:
    """List plugins with their components, broken plugins with the reason, and conflicts."""
    arguments = context.arguments
    registry = context.registry
    if arguments.json:
        print_json(as_json(registry))
        return 0
    rows = []
    for plugin in registry.found.plugins:
        kinds: dict[str, list[str]] = {}
        for component in plugin.components:
            kinds.setdefault(component.kind, []).append(component.name)
        first = (plugin.name, f"{plugin.distribution} {plugin.version}")
        for kind, names in kinds.items() or [("-", ["nothing yet"])]:
            rows.append((*first, kind, ", ".join(names)))
            first = ("", "")
    for broken in registry.found.broken:
        rows.append((broken.name, f"{broken.distribution} {broken.version}", "BROKEN", broken.reason))
    for disabled in registry.found.disabled:
        rows.append((disabled.name, f"{disabled.distribution} {disabled.version}", "off", "switched off"))
    print_table(("plugin", "distribution", "stage", "provides"), rows)
    print_conflicts(registry)
    return 0


def list_recipes(context: Invocation) -> int:
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


def print_conflicts(registry: Components, *kinds: type[Component]) -> None:
    """Print one line per conflict, or only those about components of ``kinds``."""
    for conflict in registry.conflicts:
        if not kinds or conflict.kind in [kind.kind for kind in kinds]:
            say(conflict)


def check_health(context: HealthContext) -> Iterator[CheckResult]:
    """Report broken plugins and conflicts to ``titan doctor``."""
    registry = cast(Components, context.registry)
    found = registry.found
    yield CheckResult("plugins", Health.OK, ", ".join(f"{plugin.distribution} {plugin.version}" for plugin in found.plugins))
    if found.disabled:
        shown = ", ".join(plugin.name for plugin in found.disabled)
        yield CheckResult("disabled", Health.NOTE, f"{DISABLE_VARIABLE} disables {shown}")
    for broken in found.broken:
        fix = f"update or uninstall {broken.distribution}"
        yield CheckResult(broken.name, Health.ERROR, f"{broken.distribution} {broken.version}: {broken.reason}", fix)
    for conflict in registry.conflicts:
        problem = conflict.problem
        yield CheckResult("conflict", Health.WARNING, f"{problem.where}: {problem.why}", problem.fix)


def versions(registry: Components) -> list[str]:
    """Return one line per installed package: titan-core, those of plugins, torch and Python. Does not import torch."""
    found = registry.found
    packages = {plugin.distribution: plugin.version for plugin in found.plugins}
    packages |= {broken.distribution: f"{broken.version} (broken: see `titan plugins`)" for broken in found.broken}
    packages |= {disabled.distribution: f"{disabled.version} (switched off)" for disabled in found.disabled}
    torch = importlib_metadata.version("torch")
    return [
        *(f"{name} {version}" for name, version in packages.items()),
        f"torch {torch}",
        f"Python {platform.python_version()}",
    ]


def as_json(registry: Components) -> dict[str, Any]:
    """Return the list for JSON output."""
    found = registry.found
    return {
        "plugins": [
            {
                **versions,
                "provides": [
                    {"stage": component.kind, "name": component.name, "summary": component.summary}
                    for component in plugin.components
                ],
            }
            for versions, plugin in zip(registry.versions(), found.plugins, strict=True)
        ],
        "broken": [asdict(broken) for broken in found.broken],
        "disabled": [asdict(disabled) for disabled in found.disabled],
        "conflicts": [str(conflict.problem) for conflict in registry.conflicts],
    }
