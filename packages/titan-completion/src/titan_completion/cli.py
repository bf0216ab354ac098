"""``titan completion``, ``titan config schema`` and ``titan recipe copy``. Imports no torch.

All shells share one awk program and one table, which the script contains: a completion starts no Python, whose start would
take longer than a user waits for a completion.
"""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path
from shlex import quote

from titan_completion.table import rows
from titan_core.api import CommandContext, Recipe, Registry, UserError
from titan_core.toolkit.text import print_json, say

_LEAD = """\
# A copy of recipe {name}. The comments say what each key does, with its [type and default].
# `titan train --help-all` documents all other keys.
"""
_LEAD_OF_MODEL = """\
# Trains {name} on chats. The comments say what each key does, with its [type and default].
# `titan train --help-all` documents all other keys; docs/finetuning.md describes chats.
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
    parser.add_argument("recipe_name", metavar="NAME", nargs="?", help="name of a recipe (see `titan recipes`)")
    parser.add_argument("file", metavar="FILE", nargs="?", help="TOML file to write, such as my.toml")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="write a recipe that trains this model on chats: a folder of weights, or the name of a downloaded model. "
        "FILE is then optional, and there is no NAME",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def copy(context: CommandContext) -> int:
    """Write a recipe to a file, with the documentation of each key as a comment.

    Raises:
        UserError: the recipe or model does not exist, or the file exists or cannot be written.
    """
    from titan_completion.model_recipe import default_file, model_recipe
    from titan_completion.recipe_copy import commented, commented_copy

    arguments, registry = context.arguments, context.registry
    name, model = arguments.recipe_name, arguments.model
    if model is None:
        if arguments.file is None:
            fix = "write `titan recipe copy NAME FILE`, or `titan recipe copy --model MODEL`"
            raise UserError.one("recipe copy", "needs the name of a recipe and a FILE, or --model", fix)
        recipe = registry.get(Recipe, name)
        file = _toml_file(arguments.file, name)
        text = f"{_LEAD.format(name=name)}\n{commented_copy(recipe, registry)}"
    else:
        if arguments.file is not None:
            raise UserError.one(f"--model {model}", f"replaces the recipe {name}", "give one of them")
        file = _toml_file(name, default_file(model).stem) if name is not None else default_file(model)
        if file.exists() and not arguments.force:  # deriving a model takes seconds
            raise _exists(file)
        text = f"{_LEAD_OF_MODEL.format(name=model)}\n{commented(model_recipe(model, context), registry)}"
    try:
        with file.open("w" if arguments.force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise _exists(file) from None
    except OSError as error:
        raise UserError.one(str(file), f"cannot be written: {error.strerror or error}", "name another file") from None
    if model is None:
        first = f"{file}: a copy of {name}; next:"
    else:
        first = f"{file}: trains {model} on chats.jsonl; next: set training.dataset_path to your chats,"
    say(f"{first} `titan config check {quote(str(file))}`, then `titan train {quote(str(file))}`")
    return 0


def _toml_file(given: str, name: str) -> Path:
    """
    Raises:
        UserError: it does not end in .toml.
    """
    file = Path(given)
    if file.suffix != ".toml":  # `titan train my` would look for a recipe of this name
        fix = f"write to {(file / f'{name}.toml') if file.is_dir() else file.with_suffix('.toml')}"
        raise UserError.one(str(file), "must end in .toml", fix)
    return file


def _exists(file: Path) -> UserError:
    return UserError.one(str(file), "exists already", "add --force to overwrite it, or name another file")


SHELLS = {
    "bash": "titan completion bash > ~/.local/share/bash-completion/completions/titan",
    "zsh": "titan completion zsh > DIR/_titan, where DIR is in $fpath",
    "fish": "titan completion fish > ~/.config/fish/completions/titan.fish",
}
"""Shell -> how to install its script."""


def script(shell: str, registry: Registry) -> str:
    """Return the completion script of ``shell``, one of :data:`SHELLS`, for the installed plugins."""
    folder = resources.files(__package__)
    text = folder.joinpath(f"completion.{shell}").read_text(encoding="utf-8")
    awk = folder.joinpath("candidates.awk").read_text(encoding="utf-8")
    # Quotes would end the string or the program that contains the table.
    table = "\n".join(rows(registry)).replace("'", "\N{RIGHT SINGLE QUOTATION MARK}").replace("\\", "/")
    return text.replace("@AWK@", awk).replace("@TABLE@", table)
