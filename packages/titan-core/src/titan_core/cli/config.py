"""``titan config show|check``."""

from __future__ import annotations

import argparse

from titan_core.cli.invocation import Invocation
from titan_core.config.render import to_toml
from titan_core.toolkit.arguments import json_argument, recipe_arguments, world_size_argument
from titan_core.toolkit.text import print_json, print_notes, say


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
    """Assemble the job and print that it is valid, with a note for each file that this machine lacks.

    Raises:
        UserError: the job is invalid.
    """
    arguments = context.arguments
    job = context.job(arguments.world_size, missing_ok=True)
    source, mesh = job.config.source, job.mesh
    if arguments.json:
        print_json(
            {
                "valid": True,
                "source": source,
                "world_size": mesh.world_size,
                "mesh": mesh.degrees,
                "notes": job.notes,
            }
        )
    else:
        say(f"{source}: valid for {mesh.world_size} process(es): {mesh}")
        print_notes(job.notes)
    return 0
