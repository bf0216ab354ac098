"""What makes a pipeline impossible, found before anything is built. Free of torch."""

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
)

_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_CSV = "parallelism.pipeline_parallel_schedule_csv"
_SPLIT_POINTS = "parallelism.pipeline_parallel_split_points"
_LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
_MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
_GLOBAL_BATCH = "training.global_batch_size"


def check(context: JobContext[PipelineKeys]) -> Iterator[Problem]:
    """Stages must fit the model and the ranks, microbatches the schedule."""
    facts = context.facts
    try:
        table = schedule_table(facts)
    except UserError as error:
        yield from error.problems
        return
    if facts.model.layout.tied:
        one, other = next(iter(facts.model.layout.tied.items()))
        why = f"{one} and {other} are one parameter, and the first and the last stage cannot share it"
        yield facts.config.problem(DEGREE, why, "set it to 1, or take a flavor whose parameters are not shared")
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
            yield config.problem(_SPLIT_POINTS, "they must be in the model's order, each once", "sort them")
    elif number > layout.num_blocks:
        # How many ranks would do, with as many stages a rank as now.
        most = max(1, layout.num_blocks // max(1, number // ranks))
        why = f"{number} stages need at least as many blocks, and the model has {layout.num_blocks}"
        yield config.problem(key, why, f"a pipeline of at most {most} rank(s) would work, or a schedule with fewer stages")
    if table is not None:
        if table.ranks != ranks:
            yield config.problem(_CSV, f"it has {table.ranks} rows, and {DEGREE} is {ranks}", "give a row for each rank")
        if len(table.rank_of) != number:
            why = f"it has {len(table.rank_of)} stages, and the config asks for {number}"
            yield config.problem(_CSV, why, f"adjust {key}, or leave it out")
        return
    name, schedule = facts.section(PipelineKeys).pipeline_parallel_schedule, schedule_of(facts)
    wanted = schedule.stages_a_rank
    if wanted is not None and number != wanted * ranks:
        why = f"{name} has {wanted} stage(s) on each of {ranks} ranks, and {number} stages are requested"
        others = ", ".join(other for other, one in SCHEDULES.items() if one.stages_a_rank is None)
        yield config.problem(key, why, f"ask for {wanted * ranks} stages, or set {_SCHEDULE} to one of {others}")
    elif number % ranks or number < ranks:
        why = f"{number} stages do not divide evenly over {ranks} ranks"
        yield config.problem(key, why, f"{-(-number // ranks) * ranks} stages would work")


def _microbatches(facts: JobFacts, table: ScheduleTable | None) -> Iterator[Problem]:
    config, local = facts.config, facts.section(TrainingSection).local_batch_size
    size = facts.section(PipelineKeys).pipeline_parallel_microbatch_size
    if local % size:
        why = f"it must divide training.local_batch_size {local}"
        yield config.problem(_MICROBATCH, why, f"{divisors(local)} would work")
        return
    count, ranks = microbatches_of(facts), facts.mesh.degree("pp")
    if table is not None:
        if table.microbatches != count:
            why = f"it schedules {table.microbatches} microbatches, and the config makes {count}"
            yield config.problem(_CSV, why, _way_to(facts, [table.microbatches]))
        return
    name = facts.section(PipelineKeys).pipeline_parallel_schedule
    schedule, number = schedule_of(facts), number_of_stages(facts, None)
    if schedule.needs == "stages" and count < number:
        why = f"{name} needs a microbatch for each of its {number} stages, and an optimizer step has {count}"
        yield config.problem(_SCHEDULE, why, _way_to(facts, [number]))
    if schedule.needs == "rounds" and count % max(1, count // ranks):
        why = f"{name} takes the microbatches in equal rounds over {ranks} ranks, and an optimizer step has {count}"
        yield config.problem(_SCHEDULE, why, _way_to(facts, [count // ranks * ranks, -(-count // ranks) * ranks]))


def _way_to(facts: JobFacts, counts: list[int]) -> str:
    """Which global batch makes so many microbatches."""
    size = facts.section(PipelineKeys).pipeline_parallel_microbatch_size
    shown = " or ".join(str(count) for count in dict.fromkeys(counts))
    sizes = " or ".join(str(count * size * facts.batch.ranks) for count in dict.fromkeys(counts))
    return f"{shown} would work: set {_GLOBAL_BATCH} = {sizes}, or change {_MICROBATCH}"


def _compiler(facts: JobFacts, table: ScheduleTable | None) -> Iterator[Problem]:
    section = facts.section(CompileSection)
    if splits_backward(facts) and section.enable and "model" in section.components:
        why = "the compiler cannot compute gradients of inputs and of weights apart, as this schedule does"
        fix = 'set compile.enable = false or compile.components = ["loss"], or take 1F1B or Interleaved1F1B'
        yield facts.config.problem(_CSV if table is not None else _SCHEDULE, why, fix)
