"""``titan train --dry-run``: the short form of ``titan simulate``, from the command line of a training run."""

from __future__ import annotations

import argparse
from functools import partial

from titan_core.api import CommandContext, UserError
from titan_core.toolkit.arguments import rank_count
from titan_core.toolkit.launching import RankJob
from titan_simulate.cli.simulate import print_verdicts, rank_argument, simulate_ranks, try_on_cpu


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to those of ``titan train``."""
    group = parser.add_argument_group("dry run (one step on a simulated GPU; needs neither the hardware nor the data)")
    group.add_argument("--dry-run", action="store_true", help="try one step of one rank instead of training")
    group.add_argument(
        "--world-size", type=rank_count, metavar="N", help="number of ranks (default: the smallest that the config allows)"
    )
    rank_argument(group)


def run(context: CommandContext, ranks: RankJob) -> int:
    """Try one step and print the result.

    Raises:
        UserError: the job cannot run, for the same reason for which training would fail.
    """
    options = context.arguments
    if not options.dry_run:
        option, value = ("--rank", options.rank) if options.world_size is None else ("--world-size", options.world_size)
        raise UserError.one(f"{option} {value}", "applies only to a dry run", "add --dry-run")
    from titan_simulate.engine import stub_libraries

    if (why := stub_libraries.reason()) is not None:
        return try_on_cpu(context, why)
    return simulate_ranks(context, steps=1, strict=False, show=partial(print_verdicts, context))
