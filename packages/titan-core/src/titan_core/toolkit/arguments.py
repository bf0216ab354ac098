"""Command-line arguments that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence

from titan_core.api import UserError
from titan_core.api._shown import shorten
from titan_core.api.config.numbers import LONGEST_SECONDS, MOST_PROCESSES, MOST_RANKS, MOST_STEPS
from titan_core.api.config.resolved import COMMAND_LINE, Override


def recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``[RECIPE|FILE]``."""
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE|FILE",
        help="name of a recipe or path of a TOML file (default: the recipe that `titan recipes` marks)",
    )


def world_size_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--world-size N``."""
    parser.add_argument(
        "--world-size",
        type=rank_count,
        metavar="N",
        help="number of ranks (default: the smallest that the config allows)",
    )


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return the type of an argument that takes integers from ``least`` to ``most``."""

    def whole_number(text: str) -> int:
        value = parse_integer(text, least, most)
        if value is None:
            raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a whole number from {least} to {most}")
        return value

    return whole_number


def parse_integer(text: str, least: int, most: int) -> int | None:
    """Return ``text`` as an integer from ``least`` to ``most``, or ``None`` if it is not one."""
    # Python is slow with very long numbers, and isdigit() also accepts the digits of other scripts.
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 20):
        return None
    return int(text) if least <= int(text) <= most else None


step_count = integer(1, MOST_STEPS)
"""A number of optimizer steps."""
rank_count = integer(1, MOST_RANKS)
"""A number of processes over all machines."""
process_count = integer(1, MOST_PROCESSES)
"""A number of processes on one machine."""
small_integer = integer(1, 10_000)
"""A number of items to show, write or process."""


def number(what: str, least: float, most: float) -> Callable[[str], float]:
    """Return the type of an argument that takes numbers from ``least`` to ``most``; errors refer to it as ``what``."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not {what} from {least:.12g} to {most:.12g}")
        return value

    return number


seconds = number("a number of seconds", 0.01, LONGEST_SECONDS)
"""A duration."""


def json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Convert ``["--training.steps", "100", "--optimizer.lr=1e-3"]`` to overrides.

    Raises:
        UserError: an argument is not an override, or an override has no value.
    """
    return list(_parse(iter(arguments)))


def _parse(arguments: Iterator[str]) -> Iterator[Override]:
    for argument in arguments:
        flag, equals, text = argument.partition("=")
        key = flag[2:].replace("-", "_")
        if not flag.startswith("--") or "." not in key:
            raise UserError.one(
                f"{COMMAND_LINE}: {argument}",
                "neither an option of this command nor a config override",
                "write overrides as --section.key VALUE; --help lists the keys",
            )
        if not equals:
            following = next(arguments, None)
            if following is None or following.startswith("--"):
                raise UserError.one(
                    f"{COMMAND_LINE}: {flag}", "needs a value", f"write {flag} VALUE (for booleans, true or false)"
                )
            text = following
        yield Override(key, text)
