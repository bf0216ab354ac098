"""Sections ``[profiling]``, ``[comm]`` and ``[numerics]``. Names follow TorchTitan's TOML of 2025 if it had the key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from titan_core.api import (
    ALL_KEYS,
    JobContext,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Ranks,
    RunFolder,
    Section,
    UserError,
)
from titan_core.api.config.numbers import LONGEST_SECONDS, MOST_STEPS
from titan_core.api.config.sections import JobSection

_RANKS = "profiling.ranks"
LEAST_WATCHED_SECONDS = 1.0
"""Smallest limit of the watchdog. Its timer dumps the stacks of all threads, which is safe only if they are stuck: a timer
that expires between two polls of the watchdog crashes the process."""


class ProfilingSection(Section):
    section: ClassVar[str] = "profiling"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable_profiling: bool = False
    """Write a torch profiler trace every profile_freq steps. Regardless of this key, SIGUSR2 requests a trace from a rank's
    process at any time."""
    save_traces_folder: RunFolder = "debug/traces"
    """Folder for traces, relative to the run's directory."""
    profile_freq: PositiveInt = 100
    """Number of steps from one trace to the next."""
    profiler_warmup: int = Field(default=3, ge=0, le=1000)
    """Number of steps for which the profiler runs before each trace, because its first steps are slower."""
    profiler_active: int = Field(default=1, gt=0, le=1000)
    """Number of steps in a trace."""
    ranks: list[Annotated[Ranks, Field(ge=0)]] | None = None
    """Ranks that write traces and memory snapshots. Default: all."""
    with_stack: bool = False
    """Record the call stack of each operator. Makes traces larger."""
    record_shapes: bool = True
    """Record the input shapes of each operator."""
    enable_memory_snapshot: bool = False
    """Record the history of CUDA allocations, and write it every profile_freq steps and when memory runs out."""
    save_memory_snapshot_folder: RunFolder = "debug/memory"
    """Folder for memory snapshots, relative to the run's directory."""


class CommTraceSection(Section):
    section: ClassVar[str] = "comm"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    flight_recorder: bool = True
    """Record each rank's most recent collectives in memory, and dump them when something goes wrong."""
    trace_buf_size: PositiveInt | None = None
    """Number of collectives that each rank records. Default: about those of four steps, estimated from the model and the
    mesh; at least 2000 and at most 50,000."""
    save_traces_folder: RunFolder = "debug/flight"
    """Folder for dumps, relative to the run's directory."""
    watchdog_seconds: float = Field(default=0.0, ge=0.0, le=LONGEST_SECONDS)
    """If a step takes longer than this (at least 1), every rank dumps its collectives and its threads' stacks; training
    continues. 0: four fifths of comm.train_timeout_seconds. The limit of a job's first step, which compiles, is always four
    fifths of comm.init_timeout_seconds."""

    straggler_ratio: NonNegativeFloat = 1.5
    """Report a rank whose own work in a step takes at least this many times as long as that of the median rank, in three
    successive windows of 20 steps. 0 switches it off."""

    @field_validator("straggler_ratio")
    @classmethod
    def _slower(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError("must be 0, or greater than 1")
        return value

    @field_validator("watchdog_seconds")
    @classmethod
    def _long_enough(cls, value: float) -> float:
        if 0 < value < LEAST_WATCHED_SECONDS:
            raise ValueError(f"must be 0, or at least {LEAST_WATCHED_SECONDS:g}")
        return value


class NumericsSection(Section):
    section: ClassVar[str] = "numerics"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    locate_nan: bool = True
    """If the loss or the gradient norm is not finite, repeat the step's forward pass and report the first module whose
    output is not finite. Until then this costs nothing, unless training.on_nan is "warn" or "ignore": the host then waits
    for a GPU's gradient norm in each step, because the update of a bad step would destroy the weights that show the
    cause."""
    spike_action: Literal["off", "warn", "skip", "rewind", "stop"] = "warn"
    """What to do if the loss is far above the preceding losses: log a warning; skip the step's update; go back to the newest
    checkpoint, further each time, and pass over the documents of the step, like `titan run rewind`; or stop the run."""
    spike_rewinds: PositiveInt = 3
    """Number of spikes after which the run goes back; the next one stops it."""
    spike_sigma: PositiveFloat = 6.0
    """Number of standard deviations above the mean from which a loss is a spike."""
    spike_window: int = Field(default=128, ge=8, le=MOST_STEPS)
    """Number of preceding steps over which the mean and the standard deviation are computed."""
    statistics_freq: NonNegativeInt = 0
    """Number of steps between statistics of every module's output and every parameter's gradient. 0: only on request by
    `titan statistics RUN --now`. Statistics cost an additional forward pass."""
    save_statistics_folder: RunFolder = "debug/statistics"
    """Folder for statistics, relative to the run's directory."""
    replay_freq: NonNegativeInt = 0
    """Number of steps after which a step is repeated on other ranks, and compared bit by bit, to find a device that computes
    wrong numbers. Such a check costs two further forward and backward passes. 0: only on request by `titan replay RUN`."""
    record_weights: bool = False
    """Write fingerprints of all weights before the first step and after the last to debug/weights.json, as `titan verify
    --certificate` does. They are equal on every mesh. Costs some 30 ns an element on a CPU core, twice."""


def check(context: JobContext[ProfilingSection]) -> Iterator[Problem]:
    """Yield a problem if no rank would write a trace, or if ``profile_freq`` is too small for warmup and trace."""
    section = context.section
    if section.ranks == [] and (section.enable_profiling or section.enable_memory_snapshot):
        yield context.config.problem(
            _RANKS, "no rank would write anything", "list some ranks, or omit the key for all ranks"
        )
    needed = section.profiler_warmup + section.profiler_active
    if section.enable_profiling and section.profile_freq < needed:
        warmup, active = section.profiler_warmup, section.profiler_active
        why = f"is too small: a trace takes {needed} steps ({warmup} of warmup, {active} recorded)"
        fix = f"set it to at least {needed}, or lower profiling.profiler_warmup or profiling.profiler_active"
        yield context.config.problem("profiling.profile_freq", why, fix)


def require_ranks(context: JobContext[ProfilingSection]) -> None:
    """Check ``profiling.ranks`` against the number of ranks, which is known when the job starts.

    Raises:
        UserError: the job has no such rank.
    """
    size = context.job.mesh.world_size
    outside = [rank for rank in context.section.ranks or [] if not 0 <= rank < size]
    if outside:
        why = f"rank {outside[0]} does not exist: this job has {size} rank(s), numbered from 0"
        fix = "list existing ranks, omit the key for all ranks, or start more processes"
        raise UserError(context.config.problem(_RANKS, why, fix))


def check_memory(context: JobContext[ProfilingSection]) -> Iterator[Problem]:
    """Yield a problem if the job has no CUDA memory. With ``job.device = "auto"``, this is unknown until the job starts."""
    if context.job.section(JobSection).device == "cpu":
        why = 'records GPU allocations, but job.device is "cpu"'
        yield context.config.problem("profiling.enable_memory_snapshot", why, "set it to false, or train on GPUs")
