"""``titan flight analyse`` and ``titan flight dump``. Imports no torch."""

from __future__ import annotations

import argparse
from shlex import quote

from titan_core.api import CommandContext
from titan_core.toolkit.arguments import json_argument
from titan_core.toolkit.text import print_json, print_table, printable, ranks
from titan_debug.cli.running import request_and_wait, world_size
from titan_debug.flight.analysis import Analysis, analyse
from titan_debug.flight.dump import RANK_FILE
from titan_debug.flight.read import dump_folder, read_dumps
from titan_debug.request import version

ANSWER_SECONDS = 15.0
"""How long `titan flight dump` waits for the ranks' dumps."""
EXIT_UNANSWERED = 1


def analyse_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan flight analyse``."""
    parser.add_argument("path", metavar="RUN|DIR", help="a run's directory, or a folder of dumps")
    json_argument(parser)


def dump_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan flight dump``."""
    parser.add_argument("run", metavar="RUN", help="the directory of a running job")


def run_analyse(context: CommandContext) -> int:
    """Print which rank holds up the others, and why."""
    arguments = context.arguments
    found = analyse(read_dumps(dump_folder(arguments.path)))
    if arguments.json:
        print_json(found.as_dict())
    else:
        _print(found)
    return 0


def _print(found: Analysis) -> None:
    print(printable(found.verdict))  # dumps may come from elsewhere
    for line in found.details:
        print(printable(f"  {line}"))
    print()
    print_table(
        ("rank", "step", "state"),
        [(str(rank.rank), "?" if rank.step is None else str(rank.step), rank.state) for rank in found.ranks],
    )
    if found.notes:
        print()
    for note in found.notes:
        print(printable(f"note: {note}"))


def run_dump(context: CommandContext) -> int:
    """Request a dump from every rank of a running job. Return 1 if some rank does not answer."""
    arguments = context.arguments
    size = world_size(arguments.run, f"run `titan flight analyse {quote(str(arguments.run))}` to read its last dumps")
    folder = dump_folder(arguments.run)
    files = [folder / RANK_FILE.format(rank) for rank in range(size)]
    before = [version(file) for file in files]

    def missing() -> list[int]:
        return [rank for rank, file in enumerate(files) if version(file) == before[rank]]

    waiting = request_and_wait(arguments.run, folder, "requested by `titan flight dump`", missing, ANSWER_SECONDS)
    command = f"`titan flight analyse {quote(str(arguments.run))}`"
    print(f"{size - len(waiting)} of {size} ranks dumped to {folder}; run {command} to read the dumps")
    if waiting:
        print(f"no answer within {ANSWER_SECONDS:g} s from {ranks(waiting)}")
    return EXIT_UNANSWERED if waiting else 0
