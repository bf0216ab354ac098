"""``titan simulate``, and what ``titan train --dry-run`` shares with it.

``titan train`` loads this module for the options of a dry run, so it imports nothing that is slow to import.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from titan_core.api import CommandContext, MeshPlan, UserError
from titan_core.api.config.numbers import MOST_RANKS
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import json_argument, parse_integer, recipe_arguments, step_count, world_size_argument
from titan_core.toolkit.launching import shell_command
from titan_core.toolkit.text import print_json, print_table, say, shorten, show_bytes

if TYPE_CHECKING:
    from titan_simulate.engine.command_fork import Report
    from titan_simulate.engine.on_cpu import TriedRank
    from titan_simulate.engine.real_rank import MeasuredRank
    from titan_simulate.engine.result import Peak, SimulatedRank

T = TypeVar("T")
GIB = 2**30
STAGES = "stages"
AT_ONCE = 4
"""Most ranks that are simulated at a time: each takes about a GiB."""

MEASURED_STEPS = 5
"""Steps of a real rank, if the command line does not say."""

Show = Callable[[AssembledJob, Sequence["SimulatedRank"]], None]
"""Prints what was found of the ranks of a job."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan simulate``."""
    recipe_arguments(parser)
    world_size_argument(parser)
    rank_argument(parser)
    parser.add_argument("--full", action="store_true", help="print memory by phase, the largest allocations, collectives")
    parser.add_argument(
        "--steps", type=step_count, metavar="N",
        help="steps to take (default: 1, or 2 with --full, --strict and --json: the first one makes the optimizer's state)",
    )  # fmt: skip
    parser.add_argument(
        "--strict",
        action="store_true",
        help="fail where the host waits for the device within a step (default: list such places with --full)",
    )
    parser.add_argument(
        "--real-rank",
        action="store_true",
        help="measure the rank on this machine's device, without the other ranks: time and memory, without communication",
    )
    json_argument(parser)


def rank_argument(parser: argparse._ActionsContainer) -> None:
    """Add the argument that chooses the ranks to simulate."""
    what = f'the rank to run, or "{STAGES}": one of each pipeline stage (default: 0)'
    parser.add_argument("--rank", type=_rank, metavar="R", help=what)


def run(context: CommandContext) -> int:
    """Simulate ranks and print what they need."""
    options = context.arguments
    if options.real_rank:
        return _measure(context)
    steps = options.steps or (2 if options.full or options.strict or options.json else 1)
    show = _print_json if options.json else _print_full if options.full else partial(print_verdicts, context)
    return simulate_ranks(context, steps, options.strict, show)


def simulate_ranks(context: CommandContext, steps: int, strict: bool, show: Show) -> int:
    """Simulate ``steps`` steps of the ranks that the command line chooses, and ``show`` what was found. Returns the exit
    status.

    Raises:
        UserError: the job cannot run, for the same reason for which training would fail.
        HostSync: with ``strict``, the host waits for the device within a step.
    """
    from titan_simulate.engine.command_fork import print_from_fork

    return print_from_fork(partial(_simulated, context, steps, strict, show), "simulating")


def _job(context: CommandContext, settings: Mapping[str, str]) -> AssembledJob:
    more = [Override(key, value) for key, value in settings.items()]
    return context.job(context.arguments.world_size, more, missing_ok=True)


def _simulated(context: CommandContext, steps: int, strict: bool, show: Show, report: Report) -> int:
    show(*_in_forks(context, partial(_rank_of, context, steps, strict), report))
    return 0


def _in_forks(
    context: CommandContext, run_rank: Callable[[int], T], report: Report, on_cpu: bool = False, at_once: int = AT_ONCE
) -> tuple[AssembledJob, list[T]]:
    """Run each rank in a fork of this process, which imports torch once."""
    from titan_simulate.engine import forks, stub_libraries

    forks.describe_first(lambda: _job(context, {}))
    if not on_cpu:
        stub_libraries.load()
    job, chosen = _job(context, {}), context.arguments.rank
    ranks = first_of_each_stage(job.mesh) if chosen == STAGES else [chosen or 0]
    report("importing torch")
    forks.load(on_cpu)
    found = forks.call_in_forks(
        [partial(run_rank, rank) for rank in ranks],
        at_once=min(at_once, len(os.sched_getaffinity(0))),
        done=lambda number: report(f"{number} of {len(ranks)} ranks done"),
    )
    return job, found


def _rank_of(context: CommandContext, steps: int, strict: bool, rank: int) -> SimulatedRank:
    from titan_simulate.engine.simulate import SETTINGS, simulate

    logging.disable(logging.WARNING)  # what plugins notice about a run, such as an impossible MFU, is not true of this one
    with tempfile.TemporaryDirectory(prefix="titan-simulate-") as folder:
        settings = {**SETTINGS, "training.stop_at_step": str(steps), "job.dump_folder": folder}
        return simulate(_job(context, settings), context.train, rank, strict=strict)


def try_on_cpu(context: CommandContext, why: str) -> int:
    """Take a step of the ranks that the command line chooses on the CPU. Returns the exit status.

    Args:
        why: no GPU can be simulated.

    Raises:
        UserError: the job cannot run on the CPU.
    """
    from titan_simulate.engine.command_fork import print_from_fork

    say(f"note: no GPU can be simulated ({why}); the step is tried as a job on CPUs", flush=True)
    return print_from_fork(partial(_tried, context), "trying")


def _tried(context: CommandContext, report: Report) -> int:
    job, found = _in_forks(context, partial(_try_rank, context), report, on_cpu=True)
    _print_notes(job)
    for one in found:
        say(f"rank {one.rank} of {one.world_size} ({one.mesh}): one step works ({one.seconds:.0f} s)")
    say("  not checked: memory, device syncs, and the code that only GPUs run")
    return 0


def _try_rank(context: CommandContext, rank: int) -> TriedRank:
    from titan_simulate.engine.on_cpu import SETTINGS, try_rank

    logging.disable(logging.WARNING)  # as in :func:`_rank_of`
    with tempfile.TemporaryDirectory(prefix="titan-simulate-") as folder:
        settings = {**SETTINGS, "training.stop_at_step": "1", "job.dump_folder": folder}
        return try_rank(_job(context, settings), context.train, rank)


def _measure(context: CommandContext) -> int:
    """Measure ranks on the device, and print what they need beside what a simulation says.

    Raises:
        UserError: the command line also asks for what only a simulation counts.
    """
    from titan_simulate.engine import stub_libraries
    from titan_simulate.engine.command_fork import print_from_fork

    options = context.arguments
    if options.full or options.strict:
        option = "--full" if options.full else "--strict"
        raise UserError.one(option, "counts what a simulated device does, and --real-rank measures", "drop one of the two")
    status = print_from_fork(partial(_measured, context), "measuring")
    if status or options.json or stub_libraries.reason() is not None:
        return status
    return simulate_ranks(context, steps=2, strict=False, show=partial(print_verdicts, context))


def _measured(context: CommandContext, report: Report) -> int:
    steps = context.arguments.steps or MEASURED_STEPS
    job, found = _in_forks(context, partial(_measure_rank, context, steps), report, on_cpu=True, at_once=1)
    if context.arguments.json:
        values = [asdict(one) for one in found]
        print_json(values if len(values) > 1 else values[0])
        return 0
    _print_notes(job)
    for one in found:
        reserved = "" if one.memory.reserved_gib is None else f", {one.memory.reserved_gib:.2f} GiB reserved"
        say(f"rank {one.rank} of {one.world_size} ({one.mesh}) on {one.device}: {1000 * one.step_seconds:.1f} ms a step")
        say(f"  {one.tokens_per_second:,.0f} tokens/s, without communication; the host issues a step in "
            f"{1000 * one.host_seconds:.1f} ms")  # fmt: skip
        say(f"  peak: {one.memory.peak_gib:.2f} GiB{reserved}{'' if reserved else ' of the process'}")
    return 0


def _measure_rank(context: CommandContext, steps: int, rank: int) -> MeasuredRank:
    from titan_simulate.engine.real_rank import SETTINGS, WARM_UP, measure_rank

    logging.disable(logging.WARNING)  # as in :func:`_rank_of`
    with tempfile.TemporaryDirectory(prefix="titan-simulate-") as folder:
        settings = {**SETTINGS, "training.stop_at_step": str(WARM_UP + steps + 1), "job.dump_folder": folder}
        return measure_rank(_job(context, settings), context.train, rank, steps)


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


def print_verdicts(context: CommandContext, job: AssembledJob, found: Sequence[SimulatedRank]) -> None:
    """Print that each rank works and what it needs, and the command that prints more."""
    _print_notes(job)
    for one in found:
        say("\n".join(_verdict(one)))
    recipe = [context.arguments.recipe] if context.arguments.recipe else []
    details = ["simulate", *recipe, "--world-size", str(job.mesh.world_size), "--full", *context.override_arguments]
    say(f"details: {shell_command(details)}")


def _print_notes(job: AssembledJob) -> None:
    for note in job.missing:
        say(f"note: {note.where}: {note.why}; a simulation does not need it")


def _verdict(found: SimulatedRank) -> Iterator[str]:
    peak, step = found.peak, found.steps[-1]
    owners = ", ".join(f"{owner} {show_bytes(size)}" for owner, size in peak.owners.items() if size >= peak.bytes // 100)
    calls, size = sum(one.count for one in step.collectives), sum(one.bytes for one in step.collectives)
    seconds = found.start.seconds + sum(one.seconds for one in found.steps)
    works = "one step works" if len(found.steps) == 1 else f"{len(found.steps)} steps work"
    yield f"rank {found.rank} of {found.world_size} ({found.mesh}): {works} ({seconds:.0f} s)"
    yield f"  peak: {show_bytes(peak.bytes)} ({owners}), without what the allocator, CUDA and NCCL add"
    yield from (f"  {line}" for line in _host_memory(found))
    yield f"  communication: {calls:,} collectives, {show_bytes(size)}"


def _host_memory(found: SimulatedRank) -> Iterator[str]:
    if found.on_host >= 2**20:
        yield f"host memory of what is offloaded: {show_bytes(found.on_host)}"


def _print_json(job: AssembledJob, found: Sequence[SimulatedRank]) -> None:
    """Print an object; of several ranks, a list of them."""
    values = [as_json(one) for one in found]
    print_json(values if len(values) > 1 else values[0])


def as_json(found: SimulatedRank) -> dict[str, Any]:
    """Return what was found as plain values."""
    return {**asdict(found), "peak_bytes": found.peak.bytes}


def _print_full(job: AssembledJob, found: Sequence[SimulatedRank]) -> None:
    for number, one in enumerate(found):
        say("\n" * (number > 0), end="")
        _print_tables(one)


def _print_tables(found: SimulatedRank) -> None:
    step, peak = found.steps[-1], found.peak
    say(f"rank {found.rank} of {found.world_size} ({found.mesh}), simulated {found.device}")
    say(f"peak: {_gib(peak.bytes)} GiB, in {_place(peak)}")
    for line in _host_memory(found):
        say(line)
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
        say(f"\n{_gib(step.garbage)} GiB are in reference cycles, which only Python's garbage collector frees")


def _place(peak: Peak) -> str:
    return f"{peak.operator} of {peak.module}" if peak.module else peak.operator or "no operator"


def _gib(size: int) -> str:
    return f"{size / GIB:.3f}"


def _rank(text: str) -> int | str:
    if text == STAGES:
        return STAGES
    value = parse_integer(text, 0, MOST_RANKS - 1)
    if value is None:
        raise argparse.ArgumentTypeError(f'{shorten(text)!r} is neither a rank nor "{STAGES}"')
    return value
