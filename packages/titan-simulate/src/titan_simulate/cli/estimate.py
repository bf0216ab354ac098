"""``titan estimate``."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api import CommandContext, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import json_argument, number, recipe_arguments, world_size_argument
from titan_core.toolkit.atomic_write import require_writable
from titan_core.toolkit.errors import EXIT_FAILURE
from titan_core.toolkit.text import print_json, print_notes, print_table, say
from titan_simulate.cli.explain import print_explanation
from titan_simulate.cli.explained_page import OPTION, write_page
from titan_simulate.cli.stages import all_stages, job_of_stage, print_stages, stage_argument, stages_as_json, verdict_of
from titan_simulate.engine import stub_libraries
from titan_simulate.engine.command_fork import Report, print_from_fork
from titan_simulate.engine.forks import describe_first
from titan_simulate.estimate.stages import estimate_stages, number_of_stage
from titan_simulate.hardware.machine import Machine
from titan_simulate.hardware.read import machine_argument, read_machine

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate
    from titan_simulate.estimate.explain import Explanation
    from titan_simulate.estimate.traced_rank import JobOf

SHOWN_COLLECTIVES = 6


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan estimate``."""
    recipe_arguments(parser)
    world_size_argument(parser)
    machine_argument(parser)
    imbalance_argument(parser)
    stage_argument(parser, "estimate this stage of the run only, and print all figures (default: a row for each stage)")
    parser.add_argument(
        "--assumptions", action="store_true", help="also print every figure of the machine, and how the job was reduced"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print where time and memory come from, by module, kind of work and collective",
    )
    parser.add_argument(OPTION, metavar="FILE", help="draw where time and memory come from in this HTML page")
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Estimate a step, or one of each stage, and print it. Returns 1 if one does not fit."""
    machine, file = read_machine(context.arguments.device), context.arguments.explain_html
    if file is not None:
        require_writable(Path(file), f"{OPTION} {file}")
    return print_from_fork(partial(_estimated, context, machine), "estimating")


def _job(context: CommandContext, more: Sequence[Override]) -> AssembledJob:
    return context.job(context.arguments.world_size, more, missing_ok=True)


def _estimated(context: CommandContext, machine: Machine, report: Report) -> int:
    options, file = context.arguments, context.arguments.explain_html
    explains = options.explain or file is not None
    describe_first(lambda: _job(context, ()))
    gc.disable()  # imports and traces make millions of objects and no garbage, and this process ends with the estimate
    stub_libraries.load()
    from titan_simulate.estimate.estimate import Details, estimate
    from titan_simulate.estimate.explain import explain

    began = time.monotonic()

    def simulated(stage: str, done: int, number: int) -> None:
        left = (time.monotonic() - began) / done * (number - done)
        report(f"{stage}{done} of {number} simulations done, about {left:.0f} s left")

    made_of: list[Details] = []

    def estimated(job_of: JobOf, stage: str = "") -> Estimate:
        reported, imbalance = partial(simulated, stage), options.expert_imbalance
        return estimate(job_of, context.train, machine, reported, imbalance=imbalance, details=made_of.append)

    job = _job(context, ())
    number = None if options.stage is None else number_of_stage(job, options.stage)
    if number is not None or not job.stages:
        found = estimated(partial(_job, context) if number is None else job_of_stage(context, job, number))
        explanation = explain(found, made_of[0]) if explains else None
        if file is not None and explanation is not None:
            name = Path(options.recipe).stem if options.recipe else job.name
            title = name if number is None else f"{name}, stage {options.stage}"
            write_page(Path(file), found, explanation, title, machine.memory_gib)
        if options.json:
            print_json(as_json(found) | ({} if explanation is None else {"explanation": asdict(explanation)}))
        else:
            _print(found, machine.memory_gib, options.assumptions, explanation if options.explain else None)
            if file is not None:
                say(f"wrote {file}")
        return 0 if found.fits else EXIT_FAILURE
    if explains:
        names = ", ".join(repr(stage.name) for stage in job.stages)
        raise UserError.one("--explain", f"explains one stage, and the run has {names}", "add --stage NAME")

    def of_stage(stage: AssembledJob, place: str) -> Estimate:
        nonlocal began
        began = time.monotonic()
        report(place)
        return estimated(job_of_stage(context, job, stage.stage), f"{place}: ")

    stages = estimate_stages(all_stages(context, job), of_stage)
    if options.json:
        print_json(stages_as_json(stages))
    else:
        print_stages(stages, machine.memory_gib)
        print_notes(note for note in job.notes if "never begins" in note)
    return 0 if all(stage.estimate.fits for stage in stages) else EXIT_FAILURE


def as_json(found: Estimate) -> dict[str, Any]:
    """Return an estimate as plain values."""
    return asdict(found)


def _print(found: Estimate, capacity: float, assumptions: bool, explanation: Explanation | None) -> None:
    say(f"{found.world_size} ranks ({found.mesh}) on {found.device}")
    verdict = verdict_of(found, capacity)
    say(f"memory: {found.peak_gib:.1f} GiB of {capacity:.1f} on rank {found.rank}: {verdict} (peak in {found.moment})")
    say(f"        torch has reserved {found.reserved_gib:.1f} GiB at most, of which {found.allocated_gib:.1f} are in use")
    if found.retries:
        say(f"        the device is full {found.retries} times in two steps, and torch waits to return free memory to it")
    pipeline = f", pipeline bubble {found.bubble:.0%}" if found.bubble else ""
    say(
        f"speed:  {found.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, step {found.step_seconds:.3g} s, "
        f"MFU {found.mfu:.1%}{pipeline}"
    )
    print()
    if explanation is None:
        _print_summary(found)
    else:
        print_explanation(found, explanation)
    if found.host_gib >= 0.05:
        say(f"\n{found.host_gib:.1f} GiB of host memory per rank for what is offloaded")
    print()
    if assumptions:
        print_table(("assumption", "value"), [(key, str(value)) for key, value in found.assumptions.items()])
    else:
        say(f"{len(found.assumptions)} assumptions (--assumptions prints them)")


def _print_summary(found: Estimate) -> None:
    rows = sorted(found.memory.items(), key=lambda item: -item[1])
    print_table(("memory at the peak", "GiB"), [(kind.replace("_", " "), f"{size:.2f}") for kind, size in rows])
    print()
    print_table(
        ("allocated by", "GiB"), [(module, f"{size:.2f}") for module, size in list(found.at_peak.items())[:5]]
    )  # fmt: skip
    print()
    times = sorted(found.seconds.items(), key=lambda item: -item[1])
    print_table(("device time of a step", "s"), [(kind, f"{value:.4g}") for kind, value in times if value > 0])
    if found.collectives:
        print()
        print_table(
            ("collective", "group", "ranks", "calls", "GiB", "s", "exposed s"),
            [
                (one.operator.removeprefix("c10d::").strip("_"), one.group, str(one.ranks), f"{one.count:.0f}",
                 f"{one.bytes / 2**30:.2f}", f"{one.seconds:.4g}", f"{one.exposed_seconds:.4g}")
                for one in found.collectives[:SHOWN_COLLECTIVES]
            ],
        )  # fmt: skip


MOST = 1024.0


def imbalance_argument(parser: argparse.ArgumentParser) -> None:
    """Add how unevenly the experts are chosen."""
    parser.add_argument(
        "--expert-imbalance", type=number("a factor", 1.0, MOST), default=1.0, metavar="FACTOR",
        help="rows that the experts of the busiest rank compute, relative to the mean of the ranks that divide the experts "
        "(default: 1, an even choice)",
    )  # fmt: skip
