"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import math

from titan_core.config.config import Config
from titan_core.config.load import load_config
from titan_core.registry import Registry

DEFAULT_RECIPE = "llama3_debug"


def recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """``[RECIPE|FILE]``."""
    parser.add_argument(
        "recipe",
        nargs="?",
        default=DEFAULT_RECIPE,
        metavar="RECIPE|FILE",
        help=f"a recipe's name (see `titan recipes`) or a TOML file (default: {DEFAULT_RECIPE})",
    )


def world_size_argument(parser: argparse.ArgumentParser) -> None:
    """``--world-size N``."""
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="number of processes (default: the smallest that the config allows)",
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A time greater than 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds greater than 0")
    return value


def json_argument(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def load(arguments: argparse.Namespace) -> tuple[Config, Registry]:
    """The config that the command line names, and the plugins that it leaves on."""
    return load_config(arguments.recipe, arguments.overrides, arguments.registry)
