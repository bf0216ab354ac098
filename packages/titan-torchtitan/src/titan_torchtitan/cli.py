"""``titan config import``."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

from titan_core.api import CommandContext, Dataset, Model, Optimizer, UserError
from titan_core.toolkit.arguments import json_argument
from titan_core.toolkit.errors import EXIT_FAILURE
from titan_core.toolkit.secrets import redact
from titan_core.toolkit.text import print_json, print_table
from titan_torchtitan.importing import import_recipe
from titan_torchtitan.outcome import ImportOutcome
from titan_torchtitan.reading import read
from titan_torchtitan.writing import as_json, rows, summary, to_toml

_LOCAL = ("model.tokenizer_path", "training.dataset_path", "validation.dataset_path", "checkpoint.initial_load_path")
"""Keys whose value may be a path relative to TorchTitan's repository."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan config import``."""
    parser.epilog = (
        "The table on standard error lists each key that did not stay the same. The exit status is 1 if a key is unknown or "
        "Titan cannot do what it requests; these keys are comments at the end of the recipe."
    )
    parser.formatter_class = argparse.HelpFormatter
    parser.add_argument("old", metavar="OLD.toml", help="a TOML recipe of TorchTitan from October 2025 to January 2026")
    parser.add_argument("--output", metavar="FILE", help="where to write the recipe (default: standard output)")
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Import a recipe.

    Raises:
        UserError: the file is not a TorchTitan recipe, Titan has no such model, or the output exists.
    """
    settings = context.arguments
    output = Path(settings.output) if settings.output is not None else None
    if output is not None and output.exists() and not (settings.force and output.is_file()):
        fix = "add --force to overwrite it" if output.is_file() else "name a file"
        raise UserError.one(f"--output {output}", "exists already", fix)
    registry = context.registry
    titan = {
        f"{section}.{key}" for section, owners in registry.sections().items() for cls in owners for key in cls.model_fields
    }
    old = read(settings.old, titan)
    if output is not None and output.exists() and output.samefile(settings.old):
        raise UserError.one(f"--output {output}", "is the TorchTitan recipe itself", "name another file")
    outcome = import_recipe(old, registry.names(Model), registry.names(Dataset), registry.names(Optimizer))
    recipe = to_toml(outcome)
    if output is not None:
        try:
            output.write_text(recipe, encoding="utf-8")
        except OSError as error:
            raise UserError.one(f"--output {output}", f"cannot be written: {error.strerror}", "check the folder") from None
    if settings.json:
        print_json(redact(as_json(outcome, recipe)))
    elif output is None:
        print(recipe, end="")
    with redirect_stdout(sys.stderr):
        _report(outcome, output)
    return EXIT_FAILURE if outcome.needs_attention else 0


def _report(outcome: ImportOutcome, output: Path | None) -> None:
    table = list(rows(outcome))
    if table:
        print_table(("status", "TorchTitan", "Titan"), table)
        print()
    print(f"{outcome.old.source}: keys: {summary(outcome)}")
    for key in _LOCAL:
        path = outcome.values.get(key)
        if path and path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
            print(f"{key} = {path}: not there; paths are relative to the folder that `titan train` starts in")
    print(f"next: titan config check {output or 'RECIPE.toml'} --world-size N")
