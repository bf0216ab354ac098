"""``titan data step``: lists the documents that a step of a run used."""

from __future__ import annotations

import argparse
import sys

from titan_core.api import CommandContext
from titan_core.toolkit.arguments import json_argument, step_count
from titan_core.toolkit.text import print_json, print_table
from titan_data.books.documents import UsedDocument


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan data step``."""
    parser.add_argument("run", metavar="RUN", help="run directory (job.dump_folder)")
    parser.add_argument("step", type=step_count, metavar="N", help="number of the step, from 1")
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Print the documents of a step.

    Raises:
        UserError: the run or its data cannot be read, or has changed.
    """
    from titan_data.books.documents import documents_of_step
    from titan_data.books.recorded_run import open_run

    arguments = context.arguments
    opened = open_run(context, arguments.run)
    if arguments.step > opened.last:
        note(f"the run has recorded {opened.last} steps; these are the documents that step {arguments.step} would use")
    found = documents_of_step(opened, arguments.step, note)
    if arguments.json:
        print_json({"step": arguments.step, "documents": [vars(one) for one in found]})
        return 0
    print_table(
        ("row", "dataset", "epoch", "tokens", "document"),
        [(str(one.row), one.dataset, str(one.epoch + 1), tokens_of(one), place_of(one)) for one in found],
    )
    return 0


def note(line: str) -> None:
    """Print a line that does not belong to the result."""
    print(f"titan: {line}", file=sys.stderr, flush=True)


def tokens_of(used: UsedDocument) -> str:
    """Return which tokens of the document were used: the first and the last, counted from 0."""
    return f"{used.first_token}..{used.first_token + used.tokens - 1} of {used.of}"


def place_of(used: UsedDocument) -> str:
    """Return where the document is, as far as it is known."""
    return used.place or "a document of unknown place"
