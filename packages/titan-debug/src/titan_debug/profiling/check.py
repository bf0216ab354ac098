"""What makes profiling impossible, found before anything is built. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api.build_context import JobContext
from titan_core.api.errors import Problem, UserError
from titan_core.api.sections import JobSection
from titan_debug.config import ProfilingSection

_RANKS = "profiling.ranks"


def check(context: JobContext[ProfilingSection]) -> Iterator[Problem]:
    """A trace must fit between two."""
    section = context.section
    if section.ranks == [] and (section.enable_profiling or section.enable_memory_snapshot):
        yield context.config.problem(_RANKS, "no rank would write anything", "name ranks, or leave the key out for all")
    needed = section.profiler_warmup + section.profiler_active
    if section.enable_profiling and section.profile_freq < needed:
        why = f"a trace takes {section.profiler_warmup} steps of warmup and {section.profiler_active} that it holds"
        fix = f"set it to at least {needed}, or lower profiling.profiler_warmup or profiler_active"
        yield context.config.problem("profiling.profile_freq", why, fix)


def require_ranks(context: JobContext[ProfilingSection]) -> None:
    """For a job that starts, and so has its real number of ranks.

    Raises:
        UserError: it has no such rank.
    """
    size = context.facts.mesh.world_size
    outside = [rank for rank in context.section.ranks or [] if not 0 <= rank < size]
    if outside:
        why = f"this job has {size} rank(s), numbered from 0, and no rank {outside[0]}"
        fix = "name other ranks, leave the key out for all, or start more processes"
        raise UserError(context.config.problem(_RANKS, why, fix))


def check_memory(context: JobContext[ProfilingSection]) -> Iterator[Problem]:
    """There must be CUDA memory to record. Where job.device is "auto" this is known only when the job starts."""
    if context.facts.section(JobSection).device == "cpu":
        why = 'it records the allocations of GPUs, and job.device is "cpu"'
        yield context.config.problem("profiling.enable_memory_snapshot", why, "set it to false, or train on GPUs")
