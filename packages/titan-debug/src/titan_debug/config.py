"""Sections ``[profiling]``, ``[comm]`` and ``[numerics]``. Names follow TorchTitan's TOML of 2025 where it had them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from titan_core.api.numbers import Count, Factor, FewSteps, Ranks, Seconds, Steps
from titan_core.api.run_folder import RunFolder
from titan_core.api.section import ALL_KEYS, Section

LEAST_WATCHED_SECONDS = 1.0
"""The watchdog's timer dumps the stacks of threads that may be running, which is safe only once they are stuck: one that
expires between two looks of the watchdog crashes the process."""


class ProfilingSection(Section):
    section: ClassVar[str] = "profiling"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable_profiling: bool = False
    """Write traces of torch's profiler every profile_freq steps. SIGUSR2 to a rank's process asks for one at any time,
    whether or not this is on."""
    save_traces_folder: RunFolder = "debug/traces"
    """Where, below the run's directory."""
    profile_freq: Steps = Field(default=100, gt=0)
    """Steps from one trace to the next."""
    profiler_warmup: FewSteps = Field(default=3, ge=0)
    """Steps that the profiler runs for before each trace, since its first ones are slower."""
    profiler_active: FewSteps = Field(default=1, gt=0)
    """Steps in a trace."""
    ranks: list[Annotated[Ranks, Field(ge=0)]] | None = None
    """Ranks that write traces and snapshots. Default: all."""
    with_stack: bool = False
    """Where each operator was called from; the trace grows."""
    record_shapes: bool = True
    """The shapes of each operator's inputs."""
    enable_memory_snapshot: bool = False
    """Record the history of CUDA's allocations, written every profile_freq steps and when memory runs out."""
    save_memory_snapshot_folder: RunFolder = "debug/memory"
    """Where, below the run's directory."""


class CommTraceSection(Section):
    section: ClassVar[str] = "comm"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    flight_recorder: bool = True
    """Keep the last collectives of each rank in memory, and dump them when something goes wrong."""
    trace_buf_size: Count = Field(default=2000, gt=0)
    """How many collectives each rank keeps."""
    save_traces_folder: RunFolder = "debug/flight"
    """Where dumps are written, below the run's directory."""
    watchdog_seconds: Seconds = Field(default=0.0, ge=0.0)
    """A step that takes longer than this (at least 1) has every rank dump its threads' stacks and its collectives; training
    continues. 0: four fifths of comm.train_timeout_seconds. A job's first step, which compiles, has four fifths of
    comm.init_timeout_seconds in any case."""

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
    """When the loss or the gradient norm is not finite, repeat the step's forward pass and name the first module whose
    output is bad. Costs nothing before that, but on a GPU it waits for each step's gradient norm before the update."""
    spike_action: Literal["off", "warn", "skip", "stop"] = "warn"
    """What to do about a loss far above those before it: say so, leave out the step's update, or stop."""
    spike_sigma: Factor = Field(default=6.0, gt=0.0)
    """How many standard deviations above the mean make a spike."""
    spike_window: Count = Field(default=128, ge=8)
    """Steps that mean and deviation are taken of."""
    statistics_freq: Steps = Field(default=0, ge=0)
    """Write statistics of every module's output and every parameter's gradient each so many steps; 0: only when `titan
    statistics RUN --now` asks for them. They take a forward pass of their own."""
    save_statistics_folder: RunFolder = "debug/statistics"
    """Where, below the run's directory."""
