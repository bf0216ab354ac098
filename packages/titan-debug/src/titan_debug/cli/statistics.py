"""``titan statistics``."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from pathlib import Path

from titan_core.cli.arguments import json_argument
from titan_core.cli.output import print_json, print_table
from titan_core.errors import UserError
from titan_core.metrics.run_log import RunLog
from titan_debug.config import NumericsSection
from titan_debug.statistics.moments import Moments
from titan_debug.statistics.read import read_statistics


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan statistics``."""
    parser.add_argument("run", metavar="RUN", help="a run's directory")
    parser.add_argument("--step", type=int, metavar="N", help="the step (default: the last one that there is)")
    json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each module's output and each parameter's gradient."""
    default = NumericsSection.model_fields["save_statistics_folder"].default
    folder = RunLog.read_config(arguments.run).get("numerics", {}).get("save_statistics_folder", default)
    steps = read_statistics(Path(arguments.run) / folder)
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


def _figures(one: Moments) -> dict[str, float | int | None]:
    figures = {**asdict(one), "mean": one.mean, "rms": one.rms}
    return {name: None if math.isnan(value) else value for name, value in figures.items()}  # JSON has no NaN


def _cells(one: Moments) -> tuple[str, ...]:
    return f"{one.mean: .3e}", f"{one.rms:.3e}", f"{one.abs_max:.3e}", str(one.not_finite), f"{one.count:,}"
