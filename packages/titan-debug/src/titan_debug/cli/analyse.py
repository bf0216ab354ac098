"""``titan analyse``, also spelt ``analyze``. Imports no torch."""

from __future__ import annotations

import argparse

from titan_core.api import CommandContext
from titan_core.toolkit.arguments import json_argument
from titan_core.toolkit.text import print_json, say
from titan_debug.crash.report import Report


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="RUN|DIR", help="a run's directory, or a folder of dumps")
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Print why a run failed, or which rank holds up the others."""
    report = Report.read(context.arguments.path)
    if context.arguments.json:
        print_json(report.as_dict())
    else:
        say(report.page())  # its files may come from elsewhere
    return 0
