"""``titan verify``: checks that a recipe gives the same loss curve on every mesh."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from titan_core.api import CommandContext, Phase, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import JobSection, TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import json_argument, number, recipe_arguments, step_count
from titan_core.toolkit.atomic_write import require_writable
from titan_core.toolkit.folder_lock import FolderLock
from titan_core.toolkit.runs.child_runs import ChildRun, without_checkpoints
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import print_json, print_table, say
from titan_debug.certificate.certify import certify
from titan_debug.certificate.contents import read_recorded
from titan_debug.config import NumericsSection
from titan_debug.numerics.statistics import read_statistics
from titan_debug.verify.curves import Curve, Verdict, compare
from titan_debug.verify.meshes import ONE_DEVICE, Mesh, job_on, mesh_dims, overrides_for, parse_mesh, same_batch

EXIT_DIFFERENT = 1
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference between losses that rounding explains over a few steps, by compute type."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan verify``."""
    recipe_arguments(parser)
    parser.add_argument(
        "--mesh", action="append", default=[], metavar="DIM=N,...",
        help="a mesh such as dp_shard=2,tp=2, or 1 for one device; repeat the option for several meshes: the first is the "
             "reference (with a single mesh, the reference is one device)",
    )  # fmt: skip
    parser.add_argument("--steps", type=step_count, default=5, metavar="N", help="steps to train (default: 5)")
    parser.add_argument(
        "--tolerance", type=number("a relative difference", 0.0, 1e6), metavar="X",
        help="largest relative difference between losses that counts as rounding (default: 1e-4; 2e-2 in bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--certificate", metavar="FILE",
        help="write a certificate if all meshes equal one device, with digests of config, code, data and weights; `titan "
             "certificate FILE` compares others with it",
    )  # fmt: skip
    parser.add_argument("--output", metavar="DIR", help="directory of the runs (default: outputs/verify/<recipe>)")
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Train on each mesh, compare the runs, and print the verdict. Return 1 if they differ."""
    arguments = context.arguments
    dims = mesh_dims(context.registry)
    meshes = [parse_mesh(text, dims) for text in arguments.mesh]
    if not meshes:
        raise UserError.one("titan verify", "needs at least one mesh", "pass --mesh, for example --mesh dp_shard=2")
    if len(meshes) == 1:
        meshes.insert(0, Mesh({}))
    if len(set(map(str, meshes))) < len(meshes):
        raise UserError.one("titan verify", "got the same mesh twice", "remove one of the two --mesh options")
    certified = _certified(arguments.certificate, meshes[0])
    reference = job_on(meshes[0], context, dims)
    steps = min(arguments.steps, reference.config.section(TrainingSection).steps)
    folder = Path(arguments.output or Path("outputs", "verify", Path(reference.config.section(JobSection).dump_folder).name))
    tolerance = tolerance_of(reference) if arguments.tolerance is None else arguments.tolerance
    runs, jobs = [], []
    lossy: list[float] = []
    for mesh in meshes:
        more = [*same_batch(mesh, reference, dims), *observed(reference, steps)]
        if certified:
            more.append(Override("numerics.record_weights", "true"))
        job = job_on(mesh, context, dims, more)  # report every mistake before any training
        jobs.append(job)
        declared = {one.name: one.mesh.tolerance for one in job.transforms if one.mesh.tolerance}
        lossy.append(sum(declared.values()))
        for name, error in declared.items() if not arguments.json else ():
            say(f"{mesh}: transform {name!r} is lossy: its gradients may differ by {100 * error:.3g} % (MeshUse.tolerance)")
        place = folder / str(mesh).replace(" ", "_")
        runs.append(
            ChildRun(arguments.recipe, [*context.overrides, *more, *overrides_for(mesh, dims)], mesh.processes, place)
        )
    with FolderLock(folder, f"--output {folder}"):
        for mesh, child in zip(meshes, runs, strict=True):
            if not arguments.json:
                say(f"{mesh}: {steps} steps, in {child.folder}", flush=True)
            child.train()
    curves = [read_curve(child.folder) for child in runs]
    verdicts = [
        compare(curves[0], curve, tolerance + lossy[0] + more) for curve, more in zip(curves[1:], lossy[1:], strict=True)
    ]
    print_verdicts(meshes, curves, verdicts, tolerance, arguments.json)
    if any(verdict.departure for verdict in verdicts):
        return EXIT_DIFFERENT
    if certified:
        certificate = certify(context, reference, curves[0], jobs, verdicts, [read_recorded(child.folder) for child in runs])
        certificate.write(certified)
        if not arguments.json:
            say(f"\nwrote {certified}; `titan certificate {quote(str(certified))} RECIPE|RUN` compares others with it")
    return 0


def _certified(file: str | None, reference: Mesh) -> Path | None:
    """Return the file of the certificate.

    Raises:
        UserError: the reference is a mesh of several devices, or ``file`` cannot be written.
    """
    where = f"--certificate {file}"
    if file and str(reference) != ONE_DEVICE:
        raise UserError.one(
            where, "says that meshes equal one device", f"make it the reference: --mesh 1 before {reference}"
        )
    if file and Path(file).is_dir():
        raise UserError.one(where, "is a folder", "name a file, such as certificate.json in it")
    if file:
        require_writable(Path(file), where)
    return Path(file) if file else None


def _without_nan(figures: Mapping[Any, Any]) -> dict[Any, Any]:
    """Replace values that are not finite by ``None``, because JSON cannot represent them."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in figures.items()}


def observed(job: AssembledJob, steps: int) -> list[Override]:
    """Return overrides that log every step with statistics, disable early stops, and confine all output to the run's
    directory."""
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
        *_without_loggers(job),
    ]


def _without_loggers(job: AssembledJob) -> list[Override]:
    """Return overrides that disable the metric loggers of ``job`` whose section has a key ``enable_...``."""
    sections = [logger.config for logger in job.observers if logger.first_rank and logger.config is not None]
    return [
        Override(f"{section.section}.{key}", "false")
        for section in sections
        for key in section.model_fields
        if key.startswith("enable_")
    ]


def tolerance_of(job: AssembledJob) -> float:
    """Return the default tolerance for the job's number formats. Fewer bits than those of ``bfloat16`` do not raise it, but
    another order of a sum may move a rounded value by a whole step of its format."""
    rounds = any(transform.phase is Phase.PRECISION for transform in job.transforms)
    return TOLERANCE["bfloat16" if rounds else job.config.section(TrainingSection).mixed_precision_param]


def read_curve(folder: Path) -> Curve:
    """Read the figures of the run in ``folder``."""
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
    """Print the verdict on each mesh."""
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
                        "tolerance": verdict.tolerance,
                        **_without_nan({"loss_difference": verdict.loss_difference}),
                        **_without_nan({"gradient_difference": verdict.gradient_difference}),
                        "gradient": verdict.gradient,
                        "departure": None if verdict.departure is None else _without_nan(vars(verdict.departure)),
                        "losses": list(_without_nan(dict(curve.losses)).values()),
                    }
                    for mesh, curve, verdict in zip(meshes[1:], curves[1:], verdicts, strict=True)
                },
            }
        )
        return
    rows = [(str(meshes[0]), f"{curves[0].losses[last]:.6f}", "", "", "reference")]
    for mesh, curve, verdict in zip(meshes[1:], curves[1:], verdicts, strict=True):
        answer = "same" if verdict.departure is None else f"differs at step {verdict.departure.step}"
        gradient = f"{verdict.gradient_difference:.1e} ({verdict.gradient})" if verdict.gradient else ""
        loss = f"{curve.losses.get(last, math.nan):.6f}"
        rows.append((str(mesh), loss, f"{verdict.loss_difference:.1e}", gradient, answer))
    print()
    print_table(("mesh", f"loss of step {last}", "losses differ by", "gradients by", "verdict"), rows)
    for mesh, verdict in zip(meshes[1:], verdicts, strict=True):
        if verdict.departure is not None:
            say(f"\n{mesh} first differs from {meshes[0]} at {verdict.departure}")
