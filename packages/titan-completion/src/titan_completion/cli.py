"""``titan completion``, ``titan config schema`` and ``titan recipe copy``. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote

from titan_completion.scripts import SHELLS, script
from titan_core.api import CommandContext, Recipe, UserError
from titan_core.toolkit.text import print_json

_LEAD = """\
# A copy of recipe {name}. The comments say what each key does, with its [type and default].
# `titan train --help-all` documents all other keys.
"""


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


def copy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan recipe copy``."""
    parser.add_argument("recipe_name", metavar="NAME", help="name of a recipe (see `titan recipes`)")
    parser.add_argument("file", metavar="FILE", type=Path, help="TOML file to write, such as my.toml")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def copy(context: CommandContext) -> int:
    """Write a recipe to a file, with the documentation of each key as a comment.

    Raises:
        UserError: the recipe does not exist, or the file exists or cannot be written.
    """
    from titan_completion.recipe_copy import commented_copy

    name, file, registry = context.arguments.recipe_name, context.arguments.file, context.registry
    recipe = registry.get(Recipe, name)
    if file.suffix != ".toml":  # `titan train my` would look for a recipe of this name
        raise UserError.one(
            str(file), "must end in .toml", f"write to {(file / name if file.is_dir() else file).with_suffix('.toml')}"
        )
    text = f"{_LEAD.format(name=name)}\n{commented_copy(recipe, registry)}"
    try:
        with file.open("w" if context.arguments.force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise UserError.one(str(file), "exists already", "add --force to overwrite it, or name another file") from None
    except OSError as error:
        raise UserError.one(str(file), f"cannot be written: {error.strerror or error}", "name another file") from None
    print(f"{file}: a copy of {name}; next: `titan config check {quote(str(file))}`, then `titan train {quote(str(file))}`")
    return 0
