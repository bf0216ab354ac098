"""``titan replay``: repeats a step of a running job on other ranks. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import Any

from titan_core.api import CommandContext, UserError
from titan_core.toolkit.arguments import seconds
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import say
from titan_debug.devices.verdict import ALIKE, BAD, FOLDER, REFUSED
from titan_debug.request import request_and_wait, world_size

EXIT_BAD = 1


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan replay``."""
    parser.add_argument("run", metavar="RUN", help="the directory of a running job")
    parser.add_argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for the answer (default: %(default)g)",
    )


def run(context: CommandContext) -> int:
    """Print what the ranks found. Return 1 if a device computes wrong numbers, which also ends the job.

    An answer is of a step, not of a call: it ends all calls that are waiting, as does one that a call has given up on.

    Raises:
        UserError: the job is not running, does not answer in time, or cannot repeat a step on other ranks.
    """
    run, wait = str(context.arguments.run), context.arguments.wait
    size = world_size(run, f"run `titan analyse {quote(run)}` to see how it ended")
    where = f"run {run!r}"
    if size == 1:
        raise UserError.one(where, "has one rank, and no other one to compare it with", "run `titan doctor --full`")
    before = len(_answers(run))

    def missing() -> list[int]:
        return [] if len(_answers(run)) > before else [0]

    if request_and_wait(run, Path(run) / FOLDER, "requested by `titan replay`", missing, wait):
        world_size(run, "it ended before it completed another step")
        fix = f"raise --wait if steps take long, or run `titan flight dump {quote(run)}` if the job hangs"
        raise UserError.one(where, f"did not answer within {wait:g} s", fix)
    answer = _answers(run)[before]
    if answer["kind"] == REFUSED:
        raise UserError.one(where, answer["message"], "see numerics.replay_freq in docs/numerics.md")
    say(answer["message"])
    return EXIT_BAD if answer["kind"] == BAD else 0


def _answers(run: str) -> list[dict[str, Any]]:
    kinds = (ALIKE, BAD, REFUSED)
    return [event for event in RunLog.read_events(run) if event["event"] == "finding" and event.get("kind") in kinds]
