"""Checks that a pipeline is possible, run before anything is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api.build_context import JobContext
from titan_core.api.errors import Problem, UserError
from titan_core.api.job_facts import JobFacts
from titan_core.api.sections import TrainingSection
from titan_parallel.config import CompileSection, PipelineKeys
from titan_parallel.numbers import divisors
from titan_parallel.pipeline_csv import ScheduleTable
from titan_parallel.pipeline_plan import (
    DEGREE,
    SCHEDULES,
    microbatches_of,
    number_of_stages,
    schedule_of,
    schedule_table,
    splits_backward,
    unit_of,
)

_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_CSV = "parallelism.pipeline_parallel_schedule_csv"
_SPLIT_POINTS = "parallelism.pipeline_parallel_split_points"
_LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
_MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
_GLOBAL_BATCH = "training.global_batch_size"


def check(context: JobContext[PipelineKeys]) -> Iterator[Problem]:
    """Report stages that do not fit the model or the ranks, and microbatches that do not fit the schedule."""
    facts = context.facts
    try:
        table = schedule_table(facts)
    except UserError as error:
        yield from error.problems
        return
    layout = facts.model.layout
    for name, source in layout.tied.items():
        if unit_of(name, layout) != unit_of(source, layout):
            why = f"{name} and {source} are tied, and stages of a pipeline cannot share a parameter"
            yield facts.config.problem(DEGREE, why, "set it to 1, or choose a flavor without tied parameters")
            break
    yield from _stages(facts, table)
    yield from _microbatches(facts, table)
    yield from _compiler(facts, table)


def _stages(facts: JobFacts, table: ScheduleTable | None) -> Iterator[Problem]:
    config, layout = facts.config, facts.model.layout
    ranks, number = facts.mesh.degree("pp"), number_of_stages(facts, table)
    split_points = facts.section(PipelineKeys).pipeline_parallel_split_points
    key = (
        _SPLIT_POINTS
        if split_points
        else _LAYERS
        if facts.section(PipelineKeys).pipeline_parallel_layers_per_stage
        else DEGREE
    )
    if split_points:
        units = [*layout.embedding, *(f"{layout.blocks}.{index}" for index in range(layout.num_blocks)), *layout.head]
        unknown = [name for name in split_points if name not in units[1:]]
        if unknown:
            why = f"no stage can begin with {unknown[0]!r}"
            yield config.problem(_SPLIT_POINTS, why, f"name modules from {units[1]} to {units[-1]}")
        elif split_points != sorted(set(split_points), key=units.index):
            yield config.problem(_SPLIT_POINTS, "must be in the model's order, each only once", "sort them")
    elif number > layout.num_blocks:
        # The most ranks that would work with the same number of stages per rank.
        most = max(1, layout.num_blocks // max(1, number // ranks))
        why = f"{number} stages need at least {number} blocks, and the model has {layout.num_blocks}"
        yield config.problem(key, why, f"use a pipeline of at most {most} rank(s), or a schedule with fewer stages")
    if table is not None:
        if table.ranks != ranks:
            yield config.problem(_CSV, f"has {table.ranks} rows, and {DEGREE} is {ranks}", "write one row per rank")
        if len(table.rank_of) != number:
            why = f"has {len(table.rank_of)} stages, and the config requests {number}"
            yield config.problem(_CSV, why, f"change or remove {key}")
        return
    name, schedule = facts.section(PipelineKeys).pipeline_parallel_schedule, schedule_of(facts)
    wanted = schedule.stages_per_rank
    if wanted is not None and number != wanted * ranks:
        why = f"{name} needs {wanted} stage(s) on each of {ranks} ranks, and the config requests {number} stages"
        others = ", ".join(other for other, known in SCHEDULES.items() if known.stages_per_rank is None)
        yield config.problem(key, why, f"request {wanted * ranks} stages, or set {_SCHEDULE} to one of {others}")
    elif number % ranks or number < ranks:
        why = f"{number} stages do not divide evenly over {ranks} ranks"
        yield config.problem(key, why, f"request {-(-number // ranks) * ranks} stages")


def _microbatches(facts: JobFacts, table: ScheduleTable | None) -> Iterator[Problem]:
    config, local = facts.config, facts.section(TrainingSection).local_batch_size
    size = facts.section(PipelineKeys).pipeline_parallel_microbatch_size
    if local % size:
        why = f"must divide training.local_batch_size ({local})"
        yield config.problem(_MICROBATCH, why, f"set it to one of {divisors(local)}")
        return
    count, ranks = microbatches_of(facts), facts.mesh.degree("pp")
    if table is not None:
        if table.microbatches != count:
            why = f"schedules {table.microbatches} microbatches, and the config has {count} per optimizer step"
            yield config.problem(_CSV, why, _fix_microbatches(facts, [table.microbatches]))
        return
    name = facts.section(PipelineKeys).pipeline_parallel_schedule
    schedule, number = schedule_of(facts), number_of_stages(facts, None)
    if schedule.needs == "stages" and count < number:
        why = f"{name} needs at least one microbatch per stage ({number}), and an optimizer step has {count}"
        yield config.problem(_SCHEDULE, why, _fix_microbatches(facts, [number]))
    if schedule.needs == "rounds" and count % max(1, count // ranks):
        why = f"{name} runs microbatches in equal rounds over {ranks} ranks, and an optimizer step has {count}"
        yield config.problem(_SCHEDULE, why, _fix_microbatches(facts, [count // ranks * ranks, -(-count // ranks) * ranks]))


def _fix_microbatches(facts: JobFacts, counts: list[int]) -> str:
    """Return the fix that gives an optimizer step one of ``counts`` microbatches."""
    size = facts.section(PipelineKeys).pipeline_parallel_microbatch_size
    shown = " or ".join(str(count) for count in dict.fromkeys(counts))
    sizes = " or ".join(str(count * size * facts.batch.ranks) for count in dict.fromkeys(counts))
    return f"make it {shown}: set {_GLOBAL_BATCH} = {sizes}, or change {_MICROBATCH}"


def _compiler(facts: JobFacts, table: ScheduleTable | None) -> Iterator[Problem]:
    section = facts.section(CompileSection)
    if splits_backward(facts) and section.enable and "model" in section.components:
        # So do torch's schedules. Compiled backward also frees its buffers after the first of the two passes; if it is made
        # to keep them, gradients are wrong (torch 2.15).
        why = (
            "the compiler cannot compute gradients of inputs and of weights separately, as this schedule does: the backward "
            "pass of a compiled block is one function (torch 2.15)"
        )
        fix = 'set compile.enable = false or compile.components = ["loss"], or use 1F1B or Interleaved1F1B'
        yield facts.config.problem(_CSV if table is not None else _SCHEDULE, why, fix)
