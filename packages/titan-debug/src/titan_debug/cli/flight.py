"""``titan flight dump``. Imports no torch."""

from __future__ import annotations

import argparse
from shlex import quote

from titan_core.api import CommandContext
from titan_core.toolkit.text import ranks, say
from titan_debug.flight.dump import RANK_FILE, dump_folder
from titan_debug.request import request_and_wait, version, world_size

ANSWER_SECONDS = 15.0
"""How long `titan flight dump` waits for the ranks' dumps."""
EXIT_UNANSWERED = 1


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan flight dump``."""
    parser.add_argument("run", metavar="RUN", help="the directory of a running job")


def run(context: CommandContext) -> int:
    """Request a dump from every rank of a running job. Return 1 if some rank does not answer."""
    run = str(context.arguments.run)
    size = world_size(run, f"run `titan analyse {quote(run)}` to read its last dumps")
    folder = dump_folder(run)
    files = [folder / RANK_FILE.format(rank) for rank in range(size)]
    before = [version(file) for file in files]

    def missing() -> list[int]:
        return [rank for rank, file in enumerate(files) if version(file) == before[rank]]

    waiting = request_and_wait(run, folder, "requested by `titan flight dump`", missing, ANSWER_SECONDS)
    command = f"`titan analyse {quote(run)}`"
    say(f"{size - len(waiting)} of {size} ranks dumped to {folder}; run {command} to read the dumps")
    if waiting:
        say(f"no answer within {ANSWER_SECONDS:g} s from {ranks(waiting)}")
    return EXIT_UNANSWERED if waiting else 0
