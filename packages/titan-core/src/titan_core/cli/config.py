"""``titan config show|check|schema``."""

from __future__ import annotations

import argparse

from titan_core.api.tools.arguments import json_argument, load, recipe_arguments, world_size_argument
from titan_core.api.tools.output import print_json
from titan_core.config.render import to_toml
from titan_core.config.schema import json_schema
from titan_core.job.assemble import assemble


def show(arguments: argparse.Namespace) -> int:
    """Print the resolved config."""
    config, _ = load(arguments)
    print(to_toml(config), end="")
    return 0


def check_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan config check``."""
    recipe_arguments(parser)
    world_size_argument(parser)
    json_argument(parser)


def check(arguments: argparse.Namespace) -> int:
    """Assemble the job and say that it is valid (or, by the error that is raised, why not)."""
    config, registry = load(arguments)
    job = assemble(config, registry, arguments.world_size)
    facts = job.facts
    if arguments.json:
        print_json({"valid": True, "source": config.source, "world_size": facts.mesh.world_size, "mesh": facts.mesh.degrees})
    else:
        print(f"{config.source}: valid for {facts.mesh.world_size} process(es): {facts.mesh}")
    return 0


def schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema of a recipe under the installed plugins."""
    print_json(json_schema(arguments.registry))
    return 0
