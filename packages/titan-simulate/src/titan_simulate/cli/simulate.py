"""``titan simulate``."""

from __future__ import annotations

import argparse
import logging
import tempfile
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from titan_core.api import CommandContext
from titan_core.toolkit.arguments import integer, json_argument, recipe_arguments, step_count, world_size_argument
from titan_core.toolkit.jobs import Override
from titan_core.toolkit.sections import MOST_RANKS
from titan_core.toolkit.text import print_json, print_table
from titan_simulate.engine.forks import call_in_fork, load

if TYPE_CHECKING:
    from titan_simulate.engine.result import Peak, SimulatedRank

GIB = 2**30


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan simulate``."""
    recipe_arguments(parser)
    world_size_argument(parser)
    parser.add_argument(
        "--rank", type=integer(0, MOST_RANKS - 1), default=0, metavar="R", help="the rank to run (default: 0)"
    )
    parser.add_argument(
        "--steps", type=step_count, default=2, metavar="N",
        help="steps to take (default: 2: the first one makes the optimizer's state)",
    )  # fmt: skip
    parser.add_argument(
        "--strict",
        action="store_true",
        help="fail where the host waits for the device within a step (default: list such places)",
    )
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Simulate a rank and print what it needs."""
    # The stub libraries change their process for good, so the rank runs in a fork of this one.
    found = call_in_fork(partial(_simulated, context))
    if context.arguments.json:
        print_json(as_json(found))
    else:
        _print(found)
    return 0


def _simulated(context: CommandContext) -> SimulatedRank:
    from titan_simulate.engine.data import SETTINGS  # imports numpy, which help must not

    options = context.arguments
    with tempfile.TemporaryDirectory(prefix="titan-simulate-") as folder:
        settings = {**SETTINGS, "training.stop_at_step": str(options.steps), "job.dump_folder": folder}
        job = context.job(options.world_size, [Override(key, value) for key, value in settings.items()], missing_ok=True)
        load()
        from titan_simulate.engine.simulate import simulate

        logging.disable(
            logging.WARNING
        )  # what plugins notice about a run, such as an impossible MFU, is not true of this one
        return simulate(job, context.train, options.rank, strict=options.strict)


def as_json(found: SimulatedRank) -> dict[str, Any]:
    """Return what was found as plain values."""
    return {**asdict(found), "peak_bytes": found.peak.bytes}


def _print(found: SimulatedRank) -> None:
    step, peak = found.steps[-1], found.peak
    print(f"rank {found.rank} of {found.world_size} ({found.mesh}), simulated {found.device}")
    print(f"peak: {_gib(peak.bytes)} GiB, in {_place(peak)}")
    print()
    sizes = [(owner, size) for phase in step.phases for owner, size in phase.peak.owners.items()]
    owners = list(dict.fromkeys(owner for owner, size in sizes if size >= peak.bytes // 1000))
    rows = []
    for phase in step.phases:
        figures = [phase.peak.bytes, phase.live, *(phase.peak.owners.get(owner, 0) for owner in owners)]
        rows.append((phase.name, *map(_gib, figures), str(phase.launches), f"{phase.flops / 1e12:.2f}"))
    print_table((f"GiB in step {step.step}", "peak", "end", *map(str, owners), "launches", "TFLOP"), rows)
    print()
    print_table(
        ("at the peak", "GiB", "each", "owner", "module", "shape"),
        [
            (one.operator, _gib(one.bytes * one.count), f"{one.count} x {one.bytes / 2**20:.1f} MiB", one.owner,
             one.module or "-", f"{one.dtype}{list(one.shape)}")
            for one in peak.allocations[:12]
        ],
    )  # fmt: skip
    if step.collectives:
        print()
        print_table(
            (f"collectives in step {step.step}", "phase", "group", "ranks", "calls", "MiB"),
            [
                (one.operator, one.phase, one.group, str(one.ranks), str(one.count), f"{one.bytes / 2**20:.1f}")
                for one in step.collectives
            ],
        )  # fmt: skip
    if step.waits:
        print()
        places = dict.fromkeys((wait.what, wait.where) for wait in step.waits)
        print_table((f"the host waits in step {step.step}", "at"), list(places))
    if step.garbage:
        print(f"\n{_gib(step.garbage)} GiB are in reference cycles, which only Python's garbage collector frees")


def _place(peak: Peak) -> str:
    return f"{peak.operator} of {peak.module}" if peak.module else peak.operator or "no operator"


def _gib(size: int) -> str:
    return f"{size / GIB:.3f}"
