"""``titan verify``: one loss curve, whatever the mesh."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_core.api.command import CommandContext
from titan_core.api.config import Override
from titan_core.api.errors import UserError
from titan_core.api.job import Job
from titan_core.api.runs.folder_lock import FolderLock
from titan_core.api.sections import JobSection, TrainingSection
from titan_core.api.tools.arguments import json_argument, real, recipe_arguments, step_count
from titan_core.api.tools.output import print_json, print_table
from titan_debug.config import NumericsSection
from titan_debug.statistics.read import read_statistics
from titan_debug.verify.curves import Curve, Verdict, compare
from titan_debug.verify.meshes import Mesh, job_on, mesh_dims, overrides_for, parse_mesh, same_batch
from titan_runs.child_runs import ChildRun, without_checkpoints, without_loggers
from titan_runs.run_log import RunLog

EXIT_DIFFERENT = 1
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""What rounding makes of a loss over a few steps, by the type that is computed in."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``titan verify``."""
    recipe_arguments(parser)
    parser.add_argument(
        "--mesh", action="append", default=[], metavar="DIM=N,...",
        help="a mesh such as dp_shard=2,tp=2, or 1 for one device; give it several times: the first is the reference "
             "(of one alone, the reference is one device)",
    )  # fmt: skip
    parser.add_argument("--steps", type=step_count, default=5, metavar="N", help="steps to train (default: 5)")
    parser.add_argument(
        "--tolerance", type=real("a relative difference", 0.0, 1e6), metavar="X",
        help="the largest relative difference of losses that is rounding (default: 1e-4; in bfloat16 2e-2)",
    )  # fmt: skip
    parser.add_argument("--output", metavar="DIR", help="where the runs go (default: outputs/verify/<recipe>)")
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Train on each mesh, compare, report; exit status 1 where they differ."""
    arguments = context.arguments
    dims = mesh_dims(context.registry)
    meshes = [parse_mesh(text, dims) for text in arguments.mesh]
    if not meshes:
        raise UserError.one("titan verify", "no mesh", "give --mesh dp_shard=2, or several meshes")
    if len(meshes) == 1:
        meshes.insert(0, Mesh({}))
    if len(set(map(str, meshes))) < len(meshes):
        raise UserError.one("titan verify", "a mesh is given twice", "drop one")
    reference = job_on(meshes[0], context, dims)
    steps = min(arguments.steps, reference.config.section(TrainingSection).steps)
    folder = Path(arguments.output or Path("outputs", "verify", Path(reference.config.section(JobSection).dump_folder).name))
    runs = []
    for mesh in meshes:
        more = [*same_batch(mesh, reference, dims), *observed(reference, steps)]
        job_on(mesh, context, dims, more)  # every mistake is reported before anything is trained
        place = folder / str(mesh).replace(" ", "_")
        runs.append(
            ChildRun(arguments.recipe, [*context.overrides, *more, *overrides_for(mesh, dims)], mesh.processes, place)
        )
    with FolderLock(folder, f"--output {folder}"):
        for mesh, child in zip(meshes, runs, strict=True):
            if not arguments.json:
                print(f"{mesh}: {steps} steps, in {child.folder}", flush=True)
            child.train()
    curves = [read_curve(child.folder) for child in runs]
    tolerance = tolerance_of(reference) if arguments.tolerance is None else arguments.tolerance
    verdicts = [compare(curves[0], curve, tolerance) for curve in curves[1:]]
    print_verdicts(meshes, curves, verdicts, tolerance, arguments.json)
    return EXIT_DIFFERENT if any(verdict.departure for verdict in verdicts) else 0


def _without_nan(figures: Mapping[Any, Any]) -> dict[Any, Any]:
    """For JSON, which has none."""
    return {key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in figures.items()}


def observed(job: Job, steps: int) -> list[Override]:
    """Every step is logged, with statistics, and nothing ends a run or leaves the run's directory."""
    settings = {
        "training.stop_at_step": steps,
        "metrics.log_freq": 1,
        "numerics.statistics_freq": 1,
        "numerics.save_statistics_folder": NumericsSection.model_fields["save_statistics_folder"].default,
        "numerics.spike_action": "off",
        "training.on_nan": "ignore",
        "profiling.enable_profiling": "false",
        "validation.enable": "false",
    }
    return [
        *(Override(key, str(value)) for key, value in settings.items()),
        *without_checkpoints(job),
        *without_loggers(job),
    ]


def tolerance_of(job: Job) -> float:
    """By the type that the job computes in."""
    return TOLERANCE[job.config.section(TrainingSection).mixed_precision_param]


def read_curve(folder: Path) -> Curve:
    """What the run in ``folder`` did."""
    log = RunLog.read(folder)
    losses, norms = (
        {record["step"]: math.nan if record[figure] is None else record[figure] for record in log.steps}
        for figure in ("loss", "grad_norm")
    )
    statistics = read_statistics(folder / NumericsSection.model_fields["save_statistics_folder"].default)
    return Curve(losses, norms, statistics)


def print_verdicts(
    meshes: list[Mesh], curves: list[Curve], verdicts: list[Verdict], tolerance: float, as_json: bool
) -> None:
    """The verdict on each mesh."""
    last = max(curves[0].losses)
    if as_json:
        print_json(
            {
                "reference": str(meshes[0]),
                "steps": last,
                "tolerance": tolerance,
                "meshes": {
                    str(mesh): {
                        "equal": verdict.departure is None,
                        **_without_nan({"loss_difference": verdict.loss_difference}),
                        "departure": None if verdict.departure is None else _without_nan(vars(verdict.departure)),
                        "losses": list(_without_nan(dict(curve.losses)).values()),
                    }
                    for mesh, curve, verdict in zip(meshes[1:], curves[1:], verdicts, strict=True)
                },
            }
        )
        return
    rows = [(str(meshes[0]), f"{curves[0].losses[last]:.6f}", "", "reference")]
    for mesh, curve, verdict in zip(meshes[1:], curves[1:], verdicts, strict=True):
        answer = "the same" if verdict.departure is None else f"parts at step {verdict.departure.step}"
        rows.append((str(mesh), f"{curve.losses.get(last, math.nan):.6f}", f"{verdict.loss_difference:.1e}", answer))
    print()
    print_table(("mesh", f"loss of step {last}", "largest difference", "verdict"), rows)
    for mesh, verdict in zip(meshes[1:], verdicts, strict=True):
        if verdict.departure is not None:
            print(f"\n{mesh} parts from {meshes[0]} at {verdict.departure}")
