"""``titan statistics``: prints a run's statistics of module outputs and gradients."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path
from shlex import quote

from titan_core.api import CommandContext, UserError
from titan_core.api.config.numbers import MOST_STEPS
from titan_core.toolkit.arguments import integer, json_argument, seconds
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import print_json, print_table, ranks, say, spans
from titan_debug.config import NumericsSection
from titan_debug.numerics.statistics import AddedStatistics, Moments, StepStatistics, read_statistics
from titan_debug.request import request_and_wait, world_size


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan statistics``."""
    parser.add_argument("run", metavar="RUN", help="a run's directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=integer(0, MOST_STEPS), metavar="N", help="the step to print (default: the last one with statistics)"
    )
    which.add_argument("--now", action="store_true", help="request the statistics of a running job's next step")
    parser.add_argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long --now waits for that step (default: %(default)g)",
    )
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Print one line per module output and parameter gradient."""
    arguments = context.arguments
    default = NumericsSection.model_fields["save_statistics_folder"].default
    folder = RunLog.read_folder(arguments.run, "numerics.save_statistics_folder", default)
    steps = _requested(arguments.run, folder, arguments.wait) if arguments.now else read_statistics(folder)
    step = max(steps) if arguments.step is None else arguments.step
    if step not in steps:
        fix = f"pass a step with statistics: {spans(steps)}"
        raise UserError.one(f"--step {step}", "the run has no statistics of this step", fix)
    found = steps[step]
    if arguments.json:
        by_kind = {"outputs": found.outputs, "gradients": found.gradients}
        named = {kind: {name: _figures(moments) for name, moments in by_name.items()} for kind, by_name in by_kind.items()}
        print_json({"step": step, **named})
        return 0
    rows = [("output of", name, moments) for name, moments in found.outputs.items()]
    rows += [("gradient of", name, moments) for name, moments in found.gradients.items()]
    headers = (f"step {step}", "", "mean", "rms", "largest", "not finite", "elements")
    print_table(headers, [(kind, name, *_cells(moments)) for kind, name, moments in rows])
    return 0


def _requested(run: str, folder: Path, seconds: float) -> dict[int, StepStatistics]:
    """Return the statistics of the next step of a running job.

    Raises:
        UserError: the job is not running or does not answer in time.
    """
    size = world_size(run, "omit --now to print the statistics that the run has written")
    added = AddedStatistics(folder, size)
    say(f"waiting for the next step of {size} ranks", file=sys.stderr)
    waiting = request_and_wait(run, folder, "requested by `titan statistics`", added.missing, seconds)
    if waiting:
        world_size(run, "it ended before it completed another step")
        why = f"received no statistics from {ranks(waiting)} within {seconds:g} s"
        fix = f"raise --wait if steps take long, run `titan flight dump {quote(run)}` if the job hangs, or read its log"
        raise UserError.one(f"run {run!r}", why, fix)
    return added.steps()


def _figures(moments: Moments) -> dict[str, float | int | None]:
    figures = {**asdict(moments), "mean": moments.mean, "rms": moments.rms}
    return {name: None if math.isnan(value) else value for name, value in figures.items()}  # JSON has no NaN


def _cells(moments: Moments) -> tuple[str, ...]:
    extremes = f"{moments.abs_max:.3e}", str(moments.not_finite)
    return f"{moments.mean: .3e}", f"{moments.rms:.3e}", *extremes, f"{moments.count:,}"
