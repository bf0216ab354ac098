"""Checks the profiling config before anything is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api import JobContext, Problem, UserError
from titan_core.toolkit.sections import JobSection
from titan_debug.config import ProfilingSection

_RANKS = "profiling.ranks"


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
