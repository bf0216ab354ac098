"""``titan watch``: shows a run on one screen of the terminal, from its files."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from titan_core.api import CommandContext, UserError
from titan_core.toolkit.arguments import seconds
from titan_core.toolkit.runs.run_log import RunLog


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan watch``."""
    parser.add_argument("run", metavar="RUN", help="run directory (job.dump_folder), which need not exist yet")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="SECONDS", help="time between two updates (default: 1)"
    )


def run(context: CommandContext) -> int:
    """Show the run until Ctrl-C.

    Raises:
        UserError: with ``--once``, if there is no run; without it, if stdout is not a terminal.
    """
    arguments = context.arguments
    from rich.console import Console
    from rich.live import Live

    from titan_report.dashboard import frame
    from titan_report.followed_run import FollowedRun

    console = Console(highlight=False)
    followed = FollowedRun(Path(arguments.run))
    if arguments.once:
        followed.poll()
        if not followed.exists:
            RunLog.read(arguments.run)  # raises if a file is missing
            raise UserError.one(f"run {arguments.run!r}", "has written nothing yet", "drop --once to wait for it")
        console.print(frame(followed, console.width, console.height - 1))
        return 0
    if not console.is_terminal:
        raise UserError.one("titan watch", "needs a terminal, but stdout is not one", "add --once")
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                followed.poll()
                live.update(frame(followed, console.width, console.height), refresh=True)
                time.sleep(arguments.interval)
    except KeyboardInterrupt:
        return 0
