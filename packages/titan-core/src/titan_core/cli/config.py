"""``titan config show|check|schema``."""

from __future__ import annotations

import argparse

from titan_core.api.tools.arguments import json_argument, recipe_arguments, world_size_argument
from titan_core.api.tools.output import print_json
from titan_core.cli.invocation import Invocation
from titan_core.config.render import to_toml
from titan_core.config.schema import json_schema


def show(context: Invocation) -> int:
    """Print the resolved config as TOML."""
    config = context.config()
    print(to_toml(config), end="")
    return 0


def check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan config check``."""
    recipe_arguments(parser)
    world_size_argument(parser)
    json_argument(parser)


def check(context: Invocation) -> int:
    """Assemble the job and print that it is valid.

    Raises:
        UserError: the job is invalid.
    """
    arguments = context.arguments
    job = context.job(arguments.world_size)
    facts = job.facts
    if arguments.json:
        print_json(
            {
                "valid": True,
                "source": facts.config.source,
                "world_size": facts.mesh.world_size,
                "mesh": facts.mesh.degrees,
                "notes": job.notes,
            }
        )
    else:
        print(f"{facts.config.source}: valid for {facts.mesh.world_size} process(es): {facts.mesh}")
        for note in job.notes:
            print(f"note: {note}")
    return 0


def schema(context: Invocation) -> int:
    """Print the JSON Schema of a recipe for the installed plugins."""
    print_json(json_schema(context.registry))
    return 0
