"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence

from titan_core.api.config import COMMAND_LINE, Override
from titan_core.api.errors import UserError
from titan_core.api.numbers import LONGEST_SECONDS, MOST_PROCESSES, MOST_RANKS, MOST_STEPS
from titan_core.api.tools.shown import shorten


def recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """``[RECIPE|FILE]``."""
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE|FILE",
        help="a recipe's name or a TOML file (default: the one that `titan recipes` marks)",
    )


def world_size_argument(parser: argparse.ArgumentParser) -> None:
    """``--world-size N``."""
    parser.add_argument(
        "--world-size",
        type=rank_count,
        metavar="N",
        help="number of processes (default: the smallest that the config allows)",
    )


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of an argument that takes whole numbers from ``least`` to ``most``."""

    def whole_number(text: str) -> int:
        value = parse_whole(text, least, most)
        if value is None:
            raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a whole number from {least} to {most}")
        return value

    return whole_number


def parse_whole(text: str, least: int, most: int) -> int | None:
    """``text`` as a whole number from ``least`` to ``most``; ``None`` if it is none."""
    # Only as many digits as can count: Python takes long for very long numbers, and other scripts have digits too.
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 20):
        return None
    return int(text) if least <= int(text) <= most else None


step_count = whole(1, MOST_STEPS)
"""A number of optimizer steps."""
rank_count = whole(1, MOST_RANKS)
"""A number of processes over all machines."""
process_count = whole(1, MOST_PROCESSES)
"""A number of processes on one machine."""
few = whole(1, 10_000)
"""A number of things that are shown, written or done one after another."""


def real(what: str, least: float, most: float) -> Callable[[str], float]:
    """The type of an argument that takes numbers from ``least`` to ``most``; ``what`` names it in an error."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not {what} from {least:.12g} to {most:.12g}")
        return value

    return number


seconds = real("a number of seconds", 0.01, LONGEST_SECONDS)
"""How long to wait, or between two looks."""


def json_argument(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """``["--training.steps", "100", "--optimizer.lr=1e-3"]`` -> overrides.

    Raises:
        UserError: something that is not an override, or one without a value.
    """
    return list(_parse(iter(arguments)))


def _parse(arguments: Iterator[str]) -> Iterator[Override]:
    for argument in arguments:
        flag, equals, text = argument.partition("=")
        key = flag[2:].replace("-", "_")
        if not flag.startswith("--") or "." not in key:
            raise UserError.one(
                f"{COMMAND_LINE}: {argument}",
                "not an option of this command, nor an override of the config",
                "overrides are written --section.key VALUE; --help lists them",
            )
        if not equals:
            following = next(arguments, None)
            if following is None or following.startswith("--"):
                raise UserError.one(
                    f"{COMMAND_LINE}: {flag}", "a value is needed", f"write {flag} VALUE (booleans too: true or false)"
                )
            text = following
        yield Override(key, text)
