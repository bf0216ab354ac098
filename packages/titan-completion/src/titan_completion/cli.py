"""``titan completion`` and ``titan config schema``. Imports no torch."""

from __future__ import annotations

import argparse

from titan_completion.scripts import SHELLS, script
from titan_core.api.command import CommandContext
from titan_core.api.tools.output import print_json


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan completion``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell to print the script for")
    install = "\n".join(f"  {shell:<5} {how}" for shell, how in SHELLS.items())
    parser.epilog = f"to install it:\n{install}\nPrint it again after installing or removing a plugin."


def completion(context: CommandContext) -> int:
    """Print the script."""
    print(script(context.arguments.shell, context.registry), end="")
    return 0


def schema(context: CommandContext) -> int:
    """Print the JSON Schema of a recipe for the installed plugins."""
    from titan_completion.schema import json_schema

    print_json(json_schema(context.registry))
    return 0
