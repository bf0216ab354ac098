"""``titan ft lighthouse``: the server at which replica groups meet."""

from __future__ import annotations

import argparse
import os
import signal

from titan_core.api import CommandContext, UserError
from titan_core.toolkit.arguments import integer
from titan_core.toolkit.text import say

_MOST_MS = 24 * 3600 * 1000


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--bind", default="[::]:29510", metavar="HOST:PORT", help="address to listen on (default: [::]:29510)"
    )
    parser.add_argument(
        "--min-replicas",
        type=integer(1, 2**20),
        default=1,
        metavar="N",
        help="least number of groups to start with (default: 1)",
    )
    parser.add_argument(
        "--join-timeout-ms", type=integer(1, _MOST_MS), default=60_000, metavar="MS",
        help="how long to wait for a group that is alive but has not finished its step (default: 60000)",
    )  # fmt: skip
    parser.add_argument(
        "--heartbeat-timeout-ms", type=integer(1, _MOST_MS), default=5_000, metavar="MS",
        help="a group without a sign of life for this long is dead (default: 5000)",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="log each quorum")


def run(context: CommandContext) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        UserError: torchft is not installed, or cannot listen on the address.
    """
    given = context.arguments
    os.environ.setdefault("RUST_LOG", "info" if given.verbose else "error")
    from titan_ft.torchft_api import lighthouse_server

    ends = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # waited for below; the server's threads inherit it
    try:
        server = lighthouse_server(given.bind, given.min_replicas, given.join_timeout_ms, given.heartbeat_timeout_ms)
    except (RuntimeError, OSError, ValueError) as error:
        fix = "choose another port, or stop the process that listens on it"
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise UserError.one(f"--bind {given.bind}", f"cannot listen there: {error}", fix) from None
    say(f"lighthouse at {server.address()}", flush=True)
    signal.sigwait(ends)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    server.shutdown()
    return 0
