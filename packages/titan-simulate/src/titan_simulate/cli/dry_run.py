"""``titan train --dry-run``: one whole step of one rank, without its hardware and the other ranks.

Each ``titan train`` loads this module for its options, so it imports nothing that is slow to import.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from titan_core.api import CommandContext, MeshPlan, UserError
from titan_core.toolkit.arguments import parse_integer, rank_count
from titan_core.toolkit.jobs import AssembledJob, Override
from titan_core.toolkit.launching import RankJob, shell_command
from titan_core.toolkit.sections import MOST_RANKS
from titan_core.toolkit.status import phase
from titan_core.toolkit.status_line import StatusLine
from titan_core.toolkit.text import shorten

if TYPE_CHECKING:
    from titan_simulate.engine.result import SimulatedRank

STAGES = "stages"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to those of ``titan train``."""
    group = parser.add_argument_group("dry run (one step on a simulated GPU; needs neither the hardware nor the data)")
    group.add_argument("--dry-run", action="store_true", help="try one step of one rank instead of training")
    group.add_argument(
        "--world-size", type=rank_count, metavar="N", help="number of ranks (default: the smallest that the config allows)"
    )
    group.add_argument(
        "--rank", type=_rank, metavar="R", help=f'the rank to try, or "{STAGES}": one of each pipeline stage (default: 0)'
    )


def run(context: CommandContext, ranks: RankJob) -> int:
    """Try one step and print the result.

    Raises:
        UserError: the job cannot run, for the same reason for which training would fail.
    """
    options = context.arguments
    if not options.dry_run:
        option, value = ("--rank", options.rank) if options.world_size is None else ("--world-size", options.world_size)
        raise UserError.one(f"{option} {value}", "applies only to a dry run", "add --dry-run")
    from titan_simulate.engine import forks

    # The stub libraries change their process for good. A fork leaves this one as it is, so it can end as always.
    forks.call_in_fork(partial(_try, context))
    return 0


def _try(context: CommandContext) -> None:
    """Try the requested ranks, each in a fork of this process, which imports torch once."""
    from titan_simulate.engine import forks

    options = context.arguments
    with tempfile.TemporaryDirectory(prefix="titan-dry-run-") as folder:
        with StatusLine():
            with phase("reading the recipe"):
                job = _job(context, folder)
            for note in job.missing:
                print(f"note: {note.where}: {note.why}; a dry run does not need it")
            with phase("importing torch"):
                forks.load()
        for rank in [options.rank or 0] if options.rank != STAGES else first_of_each_stage(job.mesh):
            print("\n".join(_verdict(forks.call_in_fork(partial(_simulated, context, job, rank)))))
    details = ["simulate", *(word for word in [options.recipe] if word), "--world-size", str(job.mesh.world_size)]
    print(f"details: {shell_command([*details, *context.override_arguments])}")


def _job(context: CommandContext, folder: str) -> AssembledJob:
    from titan_simulate.engine.data import SETTINGS

    settings = {**SETTINGS, "training.stop_at_step": "1", "job.dump_folder": folder}
    more = [Override(key, value) for key, value in settings.items()]
    return context.job(context.arguments.world_size, more, missing_ok=True)


def _simulated(context: CommandContext, job: AssembledJob, rank: int) -> SimulatedRank:
    from titan_simulate.engine.simulate import simulate

    logging.disable(logging.WARNING)  # what plugins notice about a run, such as an impossible MFU, is not true of this one
    with StatusLine():
        return simulate(job, context.train, rank, strict=False)


def first_of_each_stage(mesh: MeshPlan) -> Sequence[int]:
    """Return one rank of each group of pipeline stages, the first in all other dimensions."""
    coordinates = product(*(range(mesh.degrees[dim.name] if dim.divides == "layers" else 1) for dim in mesh.dims))
    ranks = []
    for place in coordinates:
        rank = 0
        for dim, index in zip(mesh.dims, place, strict=True):
            rank = rank * mesh.degrees[dim.name] + index
        ranks.append(rank)
    return ranks


def _verdict(found: SimulatedRank) -> Iterator[str]:
    peak, collectives = found.peak, Counter[str]()
    for one in found.steps[-1].collectives:
        collectives["count"] += one.count
        collectives["bytes"] += one.bytes
    owners = ", ".join(f"{owner} {_size(size)}" for owner, size in peak.owners.items() if size >= peak.bytes // 100)
    seconds = found.start.seconds + sum(step.seconds for step in found.steps)
    yield f"rank {found.rank} of {found.world_size} ({found.mesh}): one step works ({seconds:.0f} s)"
    yield f"  peak: {_size(peak.bytes)} ({owners}), without what the allocator, CUDA and NCCL add"
    yield f"  communication: {collectives['count']:,} collectives, {_size(collectives['bytes'])}"


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _rank(text: str) -> int | str:
    if text == STAGES:
        return STAGES
    value = parse_integer(text, 0, MOST_RANKS - 1)
    if value is None:
        raise argparse.ArgumentTypeError(f'{shorten(text)!r} is neither a rank nor "{STAGES}"')
    return value
