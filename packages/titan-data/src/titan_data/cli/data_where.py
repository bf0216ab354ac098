"""``titan data where``: lists the steps of a run that used a document."""

from __future__ import annotations

import argparse

from titan_core.api import CommandContext
from titan_core.toolkit.arguments import json_argument
from titan_core.toolkit.text import print_json, print_table, say
from titan_data.cli.data_step import note, place_of, tokens_of


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan data where``."""
    parser.add_argument("run", metavar="RUN", help="run directory (job.dump_folder)")
    parser.add_argument("place", metavar="FILE:LINE", help="the document, as `titan data step` prints its place")
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Print the steps that used a document.

    Raises:
        UserError: the run or its data cannot be read, or has changed; or there is no such document.
    """
    from titan_data.provenance.recorded_run import open_run
    from titan_data.provenance.steps import steps_of_document

    arguments = context.arguments
    opened = open_run(context, arguments.run)
    found = steps_of_document(opened, arguments.place, note)
    if arguments.json:
        print_json({"steps": opened.last, "uses": [{"step": step, **vars(used)} for step, used in found]})
        return 0
    if not found:
        say(f"none of the {opened.last} steps of the run used it")
        return 0
    print_table(
        ("step", "row", "dataset", "epoch", "tokens", "document"),
        [
            (str(step), str(used.row), used.dataset, str(used.epoch + 1), tokens_of(used), place_of(used))
            for step, used in found
        ],
    )
    return 0
