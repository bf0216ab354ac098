"""The stages of a run on the command line of ``titan estimate`` and ``titan plan``, and in what they print."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from titan_core.api import CommandContext
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.text import print_table, say, show_count, show_seconds
from titan_simulate.estimate.stages import StageEstimate
from titan_simulate.hardware.machine import HEADROOM

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate


def stage_argument(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--stage`` with the help ``text``."""
    parser.add_argument("--stage", metavar="NAME", help=text)


def all_stages(context: CommandContext, job: AssembledJob) -> list[AssembledJob]:
    """Return the jobs of the stages of the run that begins with ``job``, wherever their files are."""
    return [context.stage(job, number, missing_ok=True) for number in range(len(job.stages))]


def job_of_stage(
    context: CommandContext, job: AssembledJob, number: int
) -> Callable[[Sequence[Override]], AssembledJob]:  # fmt: skip
    """Return what gives stage ``number`` of ``job`` with overrides of its own."""
    return lambda more: context.stage(job, number, more, missing_ok=True)


def verdict_of(found: Estimate, capacity: float) -> str:
    """Return whether a step fits a device of ``capacity`` GiB, in words."""
    if not found.fits:
        return "DOES NOT FIT"
    spare = capacity - found.peak_gib
    return "fits" if spare > HEADROOM * capacity else f"fits, with {max(spare, 0.0):.1f} GiB to spare"


def stages_as_json(stages: Sequence[StageEstimate]) -> dict[str, Any]:
    """Return the estimates of all stages, and of the run, as plain values."""
    return {
        "seconds": sum(stage.seconds for stage in stages),
        "tokens": sum(stage.tokens for stage in stages),
        "fits": all(stage.estimate.fits for stage in stages),
        "stages": [asdict(stage) for stage in stages],
    }


def print_stages(stages: Sequence[StageEstimate], capacity: float) -> None:
    """Print a row for each stage, and what the run takes."""
    first = stages[0].estimate
    say(f"{first.world_size} ranks on {first.device}, {capacity:.1f} GiB each\n")
    print_table(
        ("stage", "steps", "tokens", "mesh", "GiB", "tokens/s/GPU", "MFU", "step s", "time", ""),
        [_row(stage, capacity) for stage in stages],
    )
    seconds, steps = sum(stage.seconds for stage in stages), stages[-1].end_step
    tokens = show_count(sum(stage.tokens for stage in stages))
    say(f"\ntotal: {show_seconds(seconds)} for {steps:,} steps, {tokens} tokens", end="")
    say(f" ({seconds / 3600 * first.world_size:,.1f} device hours), without starts, checkpoints and validation")
    large = [stage for stage in stages if not stage.estimate.fits]
    if large:
        names = ", ".join(repr(stage.name) for stage in large)
        say(f"DOES NOT FIT: stage{'s' * (len(large) > 1)} {names}")
    most = max(stages, key=lambda stage: stage.estimate.peak_gib)
    say(f"--stage {shlex.quote(most.name)} prints all figures of the stage that needs most memory")


def _row(stage: StageEstimate, capacity: float) -> tuple[str, ...]:
    found = stage.estimate
    return (
        stage.name, f"{stage.first_step + 1:,} to {stage.end_step:,}", show_count(stage.tokens), found.mesh,
        f"{found.peak_gib:.1f}", f"{found.tokens_per_second_per_gpu:,.0f}", f"{found.mfu:.1%}", f"{found.step_seconds:.3g}",
        show_seconds(stage.seconds), verdict_of(found, capacity),
    )  # fmt: skip
