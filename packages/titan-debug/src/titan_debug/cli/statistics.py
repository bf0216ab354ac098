"""``titan statistics``."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path

from titan_core.api.command import CommandContext
from titan_core.api.errors import UserError
from titan_core.api.numbers import MOST_STEPS
from titan_core.api.tools.arguments import json_argument, seconds, whole
from titan_core.api.tools.output import print_json, print_table
from titan_debug.cli.running import ask_and_wait, world_size
from titan_debug.config import NumericsSection
from titan_debug.statistics.moments import Moments
from titan_debug.statistics.read import AddedStatistics, StepStatistics, read_statistics
from titan_runs.run_log import RunLog


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan statistics``."""
    parser.add_argument("run", metavar="RUN", help="a run's directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=whole(0, MOST_STEPS), metavar="N", help="the step (default: the last one that there is)"
    )
    which.add_argument("--now", action="store_true", help="request those of the next step of a running job")
    parser.add_argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="for how long --now waits for it (default: %(default)g)",
    )
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Print a line for each module's output and each parameter's gradient."""
    arguments = context.arguments
    default = NumericsSection.model_fields["save_statistics_folder"].default
    folder = RunLog.read_folder(arguments.run, "numerics.save_statistics_folder", default)
    steps = _asked(arguments.run, folder, arguments.wait) if arguments.now else read_statistics(folder)
    step = max(steps) if arguments.step is None else arguments.step
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise UserError.one(f"--step {step}", "there are no statistics of it", f"there are those of {there}")
    found = steps[step]
    if arguments.json:
        by_kind = {"outputs": found.outputs, "gradients": found.gradients}
        named = {kind: {name: _figures(one) for name, one in of.items()} for kind, of in by_kind.items()}
        print_json({"step": step, **named})
        return 0
    rows = [("output of", name, one) for name, one in found.outputs.items()]
    rows += [("gradient of", name, one) for name, one in found.gradients.items()]
    headers = (f"step {step}", "", "mean", "rms", "largest", "not finite", "elements")
    print_table(headers, [(what, name, *_cells(one)) for what, name, one in rows])
    return 0


def _asked(run: str, folder: Path, seconds: float) -> dict[int, StepStatistics]:
    """Those of the next step of a running job.

    Raises:
        UserError: it is not running, or does not answer.
    """
    size = world_size(run, "without --now, those that it has left are shown")
    added = AddedStatistics(folder, size)
    print(f"waiting for the next step of {size} ranks", file=sys.stderr)
    waiting = ask_and_wait(run, folder, "requested by `titan statistics`", added.missing, seconds)
    if waiting:
        ranks = ", ".join(map(str, waiting[:8])) + " and others" * (len(waiting) > 8)
        world_size(run, "it ended before its next step was over")
        why = f"no statistics have come from rank {ranks} within {seconds:g} s"
        fix = "its steps may be long: give --wait more; or it hangs: `titan flight dump` shows where; or its log "
        fix += "says why they cannot be written"
        raise UserError.one(f"run {run!r}", why, fix)
    return added.steps()


def _figures(one: Moments) -> dict[str, float | int | None]:
    figures = {**asdict(one), "mean": one.mean, "rms": one.rms}
    return {name: None if math.isnan(value) else value for name, value in figures.items()}  # JSON has no NaN


def _cells(one: Moments) -> tuple[str, ...]:
    return f"{one.mean: .3e}", f"{one.rms:.3e}", f"{one.abs_max:.3e}", str(one.not_finite), f"{one.count:,}"
