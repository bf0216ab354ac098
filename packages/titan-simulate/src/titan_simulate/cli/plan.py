"""``titan plan``."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from titan_core.api import CommandContext, Config, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.config.secrets import redact
from titan_core.api.config.sections import JobSection, TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import json_argument, number, rank_count, recipe_arguments, seconds, small_integer
from titan_core.toolkit.atomic_write import require_writable
from titan_core.toolkit.errors import EXIT_INTERRUPTED
from titan_core.toolkit.text import describe_model, print_json, say
from titan_simulate.cli.estimate import imbalance_argument
from titan_simulate.cli.planned import as_json, compared, print_plan, summary, unfinished
from titan_simulate.cli.planned_stage import PlannedStage, planned_stage
from titan_simulate.cli.stages import stage_argument
from titan_simulate.engine import stub_libraries
from titan_simulate.engine.command_fork import Report, print_from_fork
from titan_simulate.engine.forks import call_in_fork, describe_first
from titan_simulate.hardware.machine import HEADROOM, Machine
from titan_simulate.hardware.read import machine_argument, read_machine
from titan_simulate.plan.candidates import GLOBAL_BATCH, JobOf, Space
from titan_simulate.plan.model_sizes import sizes_of
from titan_simulate.plan.search import INTERRUPTED, Figures, Plan, Search

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan plan``."""
    recipe_arguments(parser)
    parser.add_argument("--gpus", type=rank_count, required=True, metavar="N", help="number of devices, one rank each")
    machine_argument(parser)
    stage_argument(parser, "the stage of a run with [[stages]] to plan (default: the first one)")
    imbalance_argument(parser)
    parser.add_argument(
        "--headroom", type=number("a share", 0.0, 0.9), default=HEADROOM, metavar="SHARE",
        help=f"share of the device's memory that stays free, because estimates err (default: {HEADROOM})",
    )  # fmt: skip
    parser.add_argument(
        "--allow-precision",
        action="store_true",
        help="also vary what changes the numbers that are computed, such as float8 (default: keep the recipe's)",
    )
    parser.add_argument(
        "--finalists", type=small_integer, default=6, metavar="N", help="number of candidates to estimate (default: 6)"
    )
    parser.add_argument(
        "--time-limit", type=seconds, metavar="S",
        help="start no estimate that may end after this time, once a candidate fits; a comparison that it cuts short "
        "exits with status 1 (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--best", type=small_integer, default=5, metavar="N", help="number of candidates to print (default: 5)"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the recipe of the best candidate to this new file, if the comparison is complete",
    )
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Search and print."""
    options = context.arguments
    whole = read_machine(options.device)
    machine = whole.model_copy(update={"memory_gib": whole.memory_gib * (1.0 - options.headroom)})
    if options.out is not None and os.path.lexists(options.out):
        raise UserError.one(f"--out {options.out}", "already exists", "name a new file")
    if options.out is not None:
        require_writable(Path(options.out), f"--out {options.out}")
    return print_from_fork(partial(_planned, context, machine), "planning")


def _planned(context: CommandContext, machine: Machine, report: Report) -> int:
    plan, stage = searched(context, context.arguments.gpus, machine, report)
    return conclude(context, plan, machine, stage)


def searched(context: CommandContext, gpus: int, machine: Machine, report: Report) -> tuple[Plan, PlannedStage | None]:
    """Search for the fastest way to run the recipe on ``gpus`` devices of ``machine``. Return the plan, and the stage of the
    recipe that was planned, if it has stages. Called in a fork of the command, once or several times.

    Raises:
        UserError: the recipe has a mistake, or no mesh has this number of ranks.
    """
    options = context.arguments
    stage: PlannedStage | None = None

    def job_of(more: Sequence[Override]) -> AssembledJob:
        return context.job(gpus, more, missing_ok=True) if stage is None else stage.job_of(more)

    def any_job() -> AssembledJob:
        return context.job(None, missing_ok=True) if stage is None else stage.any_job()

    def space_of() -> tuple[Space, AssembledJob | None, AssembledJob]:
        nonlocal stage
        stage = planned_stage(context, gpus, options.stage)
        given, job = _recipe_job(any_job, job_of, gpus)
        config = context.config() if stage is None or stage.number == 0 else job.config
        global_batch = job.batch.global_size if given is not None else config.section(TrainingSection).global_batch_size
        fixed = config.overridden - {dim.degree_key for dim in job.mesh.dims if config.value(dim.degree_key) == -1}
        space = Space(job, gpus, global_batch, fixed, options.allow_precision)
        if next(space.meshes(()), None) is None:
            why = "no mesh has this number of ranks with the degrees that are fixed, and this model and global batch"
            raise UserError.one(f"--gpus {gpus}", why, "change it, or fix fewer degrees")
        return space, given, job

    describe_first(space_of)
    stub_libraries.load()
    space, given, job = space_of()
    report("importing torch")
    logging.getLogger("titan_core").setLevel(logging.ERROR)  # each finalist would log the same notes
    from titan_simulate.estimate.estimate import estimate
    from titan_simulate.plan.shapes import shapes_of

    # In a fork: what a model imports to build itself may use the device.
    shapes = call_in_fork(partial(shapes_of, job.family.define, job.model_args))
    sizes = sizes_of(job.model, shapes.parameters, shapes.modules, job.batch.seq_len)

    def estimate_of(one: JobOf) -> Estimate:
        return estimate(one, context.train, machine, imbalance=options.expert_imbalance)

    def estimated(overrides: Sequence[Override]) -> Figures:
        if stage is not None:
            return stage.estimated(overrides, estimate_of, machine.memory_gib)
        return estimate_of(lambda more: job_of([*overrides, *more]))

    assembles = job_of if stage is None else stage.checked
    search = Search(space, sizes, machine, assembles, options.expert_imbalance)
    plan = search.run(estimated, options.finalists, given, options.time_limit, report)
    plan.model = describe_model(job.name, job.model.num_params, job.model.num_active_params)
    return plan, stage


def conclude(context: CommandContext, plan: Plan, machine: Machine, stage: PlannedStage | None = None) -> int:
    """Print ``plan``, write the recipe of its winner, and return the exit status. A comparison that was not finished has no
    winner."""
    options, best = context.arguments, plan.winner
    if options.out is not None and best is not None:
        text = f"{compared(plan)}. The best: {summary(best)}"
        later = stage is not None and stage.number > 0
        config = context.config(() if later else best.candidate.overrides)
        config = stage.config(config, best.candidate.values) if stage is not None and later else config
        write_recipe(Path(options.out), config, _command(context), text)
    if options.json:
        of_stage = {} if stage is None else {"stage": stage.as_json()}
        print_json({**of_stage, **as_json(plan, machine, options.best)})
    else:
        if stage is not None:
            say(stage.describe())
        print_plan(plan, machine, options.best)
        if plan.stopped is not None:
            say(f"\n{unfinished(plan, options.out)}")
        elif options.out is not None and best is not None:
            say(f"\nwrote {options.out}")
    if plan.stopped == INTERRUPTED:
        return EXIT_INTERRUPTED
    return 1 if best is None else 0


def write_recipe(path: Path, config: Config, command: str, summary: str) -> None:
    """Write ``config`` to the new file ``path``: its stages, and the keys that the recipe, command line and plan set.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    stages = {"stages": [dict(stage.table) for stage in config.stages]} if config.stages else {}
    text = f"# Planned by `{command}`\n# {summary}\n\n{tomli_w.dumps(redact({**tables_of(config), **stages}))}"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError.one(f"--out {path}", f"cannot be written: {error.strerror}", "name a new file") from None


def tables_of(config: Config) -> dict[str, dict[str, Any]]:
    """Return the keys of ``config`` that are set, by section. The run directory follows from the new file's name, unless the
    command line sets it."""
    tables: dict[str, dict[str, Any]] = {}
    for cls, section in config.sections.items():
        found = section.model_dump(exclude_unset=True, exclude_none=True)
        if cls is JobSection and "job.dump_folder" not in config.overridden:
            found.pop("dump_folder", None)
        if found:
            tables.setdefault(cls.section, {}).update(found)
    return tables


def _recipe_job(
    any_job_of: Callable[[], AssembledJob], job_of: JobOf, gpus: int
) -> tuple[AssembledJob | None, AssembledJob]:
    """Return the recipe's own job, or ``None`` if its degrees do not fit the number of devices; and any job of the recipe.

    Raises:
        UserError: the recipe has another mistake, or its global batch follows from degrees that do not fit.
    """
    try:
        job = job_of(())
    except UserError as error:
        any_job = any_job_of()  # mistakes that have nothing to do with the number of devices
        if any_job.config.section(TrainingSection).global_batch_size < 0:
            why = f"the recipe's degrees do not give a global batch on {gpus} GPUs ({error.problems[0].why})"
            where = any_job.config.where(GLOBAL_BATCH)
            raise UserError.one(where, why, f"set --{GLOBAL_BATCH} N; every candidate keeps it") from error
        return None, any_job
    return job, job


def _command(context: CommandContext) -> str:
    options = context.arguments
    headroom = "" if options.headroom == HEADROOM else f" --headroom {options.headroom:g}"
    headroom += "" if options.stage is None else f" --stage {shlex.quote(options.stage)}"
    headroom += "" if options.expert_imbalance == 1.0 else f" --expert-imbalance {options.expert_imbalance:g}"
    overrides = "".join(f" {argument}" for argument in context.override_arguments)
    return f"titan plan {options.recipe} --gpus {options.gpus} --device {options.device}{headroom}{overrides}"
