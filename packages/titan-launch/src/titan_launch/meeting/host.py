"""``titan rendezvous``: hosts the store where the machines of jobs meet, on a machine that outlives them."""

from __future__ import annotations

import argparse
import os
import signal

from titan_core.api import CommandContext, UserError
from titan_core.toolkit.listening import EVERY_ADDRESS, bound_socket, serve
from titan_core.toolkit.status import phase
from titan_core.toolkit.text import say
from titan_launch.meeting.rendezvous import DEFAULT_PORT, host_and_port


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``titan rendezvous``."""
    parser.add_argument(
        "endpoint",
        nargs="?",
        default=f"0.0.0.0:{DEFAULT_PORT}",
        metavar="ADDRESS:PORT",
        help=f"where to listen (default: port {DEFAULT_PORT} on all addresses)",
    )


def run(context: CommandContext) -> int:
    """Host the store until SIGINT or SIGTERM.

    Raises:
        UserError: this machine cannot listen there.
    """
    host, port = host_and_port(context.arguments.endpoint)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # in the threads of the store too
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # titan reports failures
    with phase("importing torch"):
        import torch.distributed  # noqa: F401 - takes seconds
    try:
        store = serve(bound_socket(host, port))
    except OSError as error:
        why = f"this machine cannot listen there: {error.strerror or error}"
        raise UserError.one(f"{host}:{port}", why, "choose another address or port") from error
    shown = os.uname().nodename if host in EVERY_ADDRESS else host
    say(f"titan: hosting the rendezvous of jobs with --rdzv-endpoint {shown}:{store.port}; Ctrl-C ends it", flush=True)
    signal.sigwait((signal.SIGINT, signal.SIGTERM))
    return 0
