"""``titan report``: writes an HTML page about runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titan_core.api import CommandContext, UserError
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import say

DEFAULT_FILE = "report.html"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan report``."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory (job.dump_folder)")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"where to write the page (default: {DEFAULT_FILE} in the first run's directory)",
    )
    parser.add_argument("--png", help=argparse.SUPPRESS)


def run(context: CommandContext) -> int:
    """Write the page.

    Raises:
        UserError: a run cannot be read, or the page cannot be written.
    """
    arguments = context.arguments
    if arguments.png is not None:
        fix = "open the page, and save a chart by the camera in its upper right corner"
        raise UserError.one("--png", "is gone: the page's charts save themselves as PNG", fix)
    from titan_report.page import write_report

    folders = {Path(name).resolve(): Path(name) for name in arguments.runs}  # drops duplicates
    runs = [RunLog.read(folder) for folder in folders.values()]
    for one in runs:
        if one.skipped:
            say(f"titan: {one.path}: skipped {one.skipped} lines that are too long or nested too deeply", file=sys.stderr)
    file = Path(arguments.output) if arguments.output else runs[0].path / DEFAULT_FILE
    write_report(runs, file)
    say(file)
    return 0
