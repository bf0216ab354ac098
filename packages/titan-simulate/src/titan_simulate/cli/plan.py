"""``titan plan``."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api import CommandContext, Recipe, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import json_argument, number, recipe_arguments, seconds, small_integer
from titan_core.toolkit.atomic_write import require_writable
from titan_core.toolkit.text import describe_model
from titan_simulate.cli.estimate import imbalance_argument
from titan_simulate.cli.plan_inputs import Device, check_inputs, check_job, read_devices, scale_arguments
from titan_simulate.cli.plan_model import describe_batch, model_arguments, recipe_of_model
from titan_simulate.cli.plan_result import conclude
from titan_simulate.cli.plan_table import conclude_table, powers_of_two, rows_of
from titan_simulate.cli.planned_stage import PlannedStage, planned_stage
from titan_simulate.cli.stages import stage_argument
from titan_simulate.engine import forks, stub_libraries
from titan_simulate.engine.command_fork import Report, print_from_fork
from titan_simulate.engine.forks import call_in_fork, describe_first
from titan_simulate.estimate.job_memory import frozen_parameters
from titan_simulate.hardware.machine import HEADROOM, Machine
from titan_simulate.plan.candidates import JobOf, Space
from titan_simulate.plan.kinds import GLOBAL_BATCH, SmallJob, Taken, take_all
from titan_simulate.plan.result import Figures, Plan
from titan_simulate.plan.search import Search

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate


Traces = dict[tuple[stub_libraries.Device, int, tuple[Override, ...], int], Taken]
"""(what is simulated, :data:`~titan_simulate.plan.kinds.SmallJob`) -> its trace."""
TIME_LIMIT = 60.0
"""Seconds after which a search traces and estimates no more."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan plan``."""
    recipe_arguments(parser)
    model_arguments(parser)
    scale_arguments(parser)
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
        "--time-limit", type=seconds, default=TIME_LIMIT, metavar="S",
        help=f"trace and estimate nothing further after this time (default: {TIME_LIMIT:g})",
    )  # fmt: skip
    parser.add_argument(
        "--best", type=small_integer, default=5, metavar="N", help="number of candidates to print (default: 5)"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the recipe of the best candidate to this new file",
    )
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Search and print."""
    options = context.arguments
    devices = read_devices(options)
    check_inputs(options, devices, context.registry.names(Recipe))
    if options.out is not None and os.path.lexists(options.out):
        raise UserError.one(f"--out {options.out}", "already exists", "name a new file")
    if options.out is not None:
        require_writable(Path(options.out), f"--out {options.out}")
    return print_from_fork(partial(_planned, context, devices), "planning")


def _planned(context: CommandContext, devices: Sequence[Device], report: Report) -> int:
    options, notes, traces = context.arguments, list[str](), Traces()
    if options.model is not None:
        report("reading the model")
        context = context.with_recipe(f"--model {options.model}", call_in_fork(partial(recipe_of_model, context)))
        notes.append(describe_batch(context))
    least_gib = call_in_fork(partial(check_job, context))
    if options.gpus is not None and len(devices) == 1:
        plan, stage = searched(context, options.gpus, devices[0].machine, report, traces)
        return conclude(context, plan, devices[0].machine, stage, devices[0].price, notes)

    def search(gpus: int, device: Device) -> Plan:
        place = f"{gpus} x {device.name}"
        report(place)
        plan, stage = searched(context, gpus, device.machine, lambda text: report(f"{place}: {text}"), traces)
        notes[:] = notes if stage is None or notes else stage.describe().split("\n")
        return plan

    numbers = powers_of_two(options.max_gpus) if options.gpus is None else [options.gpus]
    return conclude_table(rows_of(devices, numbers, least_gib, search), options, notes)


def searched(
    context: CommandContext, gpus: int, machine: Machine, report: Report, traces: Traces
) -> tuple[Plan, PlannedStage | None]:
    """Search for the fastest way to run the recipe on ``gpus`` devices of ``machine``. Return the plan, and the stage of the
    recipe that was planned, if it has stages. Called in a fork of the command, once or several times.

    Args:
        traces: those of earlier searches, which do not depend on ``gpus``.

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
        return space, given if options.model is None else None, job

    describe_first(space_of)
    stub_libraries.load()
    space, given, job = space_of()
    report("importing torch")
    logging.getLogger("titan_core").setLevel(logging.ERROR)  # each finalist would log the same notes
    from titan_simulate.estimate.estimate import device_of, estimate
    from titan_simulate.estimate.shapes import shapes_of
    from titan_simulate.plan.composer import Composer
    from titan_simulate.torch_private import let_forks_use_the_device

    def job_on(ranks: int, more: Sequence[Override]) -> AssembledJob:
        return context.job(ranks, more, missing_ok=True) if stage is None else replace(stage, gpus=ranks).job_of(more)

    forks.load()
    frozen = call_in_fork(partial(frozen_parameters, job))  # what a model imports to build itself may use the device

    def estimate_of(one: JobOf) -> Estimate:
        return estimate(one, context.train, machine, imbalance=options.expert_imbalance)

    def estimated(overrides: Sequence[Override]) -> Figures:
        if stage is not None:
            return stage.estimated(overrides, estimate_of, machine.memory_gib)
        return estimate_of(lambda more: job_of([*overrides, *more]))

    @cache
    def prepare() -> None:
        """Import and compute what each simulation of the model needs, once."""
        stub_libraries.describe(device)
        let_forks_use_the_device()  # importing a model may initialise it, as torchao does
        shapes_of(job.family.define, job.model_args)
        for compute in job.model.layout.buffers.values():
            compute()

    device = device_of(machine)

    def simulated(what: str, argument: Any) -> Any:
        prepare()
        if what == "estimate":
            return estimated(argument)
        return take_all(job_on, context.train, device, argument)

    forker = forks.Forker(simulated)
    try:

        def take(jobs: Sequence[SmallJob], meanwhile: Callable[[], None]) -> Sequence[Taken]:
            keys = [(device, ranks, tuple(overrides), blocks) for ranks, overrides, blocks in jobs]
            new = {key: job for key, job in zip(keys, jobs, strict=True) if key not in traces}
            traces.update(zip(new, forker("take", list(new.values()), meanwhile=meanwhile), strict=True))
            return [traces[key] for key in keys]

        composer = Composer(space, machine, take, frozen, options.expert_imbalance)
        search = Search(space, composer, machine, job_of if stage is None else stage.checked)
        plan = search.run(partial(forker, "estimate"), options.finalists, given, options.time_limit, report)
    finally:
        forker.close()
    plan.model = describe_model(job.name, job.model.num_params, job.model.num_active_params)
    return plan, stage


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
