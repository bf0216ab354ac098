"""Checks that a pipeline is possible, run before anything is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api import Job, JobContext, Problem, UserError
from titan_core.api.config.sections import TrainingSection
from titan_parallel.config import CompileSection, PipelineKeys
from titan_parallel.hints import Option, Refusal, degrees_below, divisors, problems
from titan_parallel.pipeline_plan import (
    DEGREE,
    SCHEDULES,
    microbatches_of,
    number_of_stages,
    schedule_of,
    schedule_table,
    splits_backward,
    stages_of_layers,
)

_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_CSV = "parallelism.pipeline_parallel_schedule_csv"
_SPLIT_POINTS = "parallelism.pipeline_parallel_split_points"
_LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
_ENDS = ("parallelism.pipeline_parallel_first_stage_less_layers", "parallelism.pipeline_parallel_last_stage_less_layers")
_MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
_LOCAL_BATCH = "training.local_batch_size"
_GLOBAL_BATCH = "training.global_batch_size"
_BY_MERIT = sorted(SCHEDULES, key=lambda name: name in ("GPipe", "LoopedBFS"))  # which keep most activations
_CHANGE = f"change {_GLOBAL_BATCH} or {_MICROBATCH}"


def check(context: JobContext[PipelineKeys]) -> Iterator[Problem]:
    """Report stages that do not fit the model or the ranks, and microbatches that do not fit the schedule."""
    try:
        schedule_table(context.job)
    except UserError as error:
        yield from error.problems
        return
    yield from problems(context.job, _stages, _microbatches, _compiler)


def _stages(job: Job) -> Iterator[Refusal]:
    layout, table = job.model.layout, schedule_table(job)
    ranks, number = job.mesh.degree("pp"), number_of_stages(job, table)
    if ranks == 1:
        return
    keys = job.section(PipelineKeys)
    split_points = keys.pipeline_parallel_split_points
    key = _SPLIT_POINTS if split_points else _LAYERS if keys.pipeline_parallel_layers_per_stage else DEGREE
    if split_points:
        units = [*layout.embedding, *(f"{layout.blocks}.{index}" for index in range(layout.num_blocks)), *layout.head]
        unknown = [name for name in split_points if name not in units[1:]]
        if unknown:
            why = f"no stage can begin with {unknown[0]!r}"
            yield Refusal(_SPLIT_POINTS, why, otherwise=f"name modules from {units[1]} to {units[-1]}")
        elif split_points != sorted(set(split_points), key=units.index):
            yield Refusal(_SPLIT_POINTS, "must be in the model's order, each only once", otherwise="sort them")
    elif number > layout.num_blocks:
        why = f"{number} stages need at least {number} blocks, and the model has {layout.num_blocks}"
        yield Refusal(key, why, _other_stages(job), "use a model with more blocks")
        return
    if table is not None:
        if table.ranks != ranks:
            why = f"has {table.ranks} rows, and {DEGREE} is {ranks}"
            yield Refusal(_CSV, why, otherwise="write one row per rank")
        if len(table.rank_of) != number:
            why = f"has {len(table.rank_of)} stages, and the config requests {number}"
            yield Refusal(_CSV, why, otherwise=f"change or remove {key}")
        return
    name, per_rank = keys.pipeline_parallel_schedule, schedule_of(job).stages_per_rank
    if stages_fit(number, ranks, per_rank):
        return
    if per_rank is not None:
        why = f"{name} needs {per_rank} stage(s) on each of {ranks} ranks, and the config requests {number} stages"
    else:
        why = f"{number} stages do not divide evenly over {ranks} ranks"
    most = len(layout.embedding) + layout.num_blocks + len(layout.head)
    possible = [count for count in range(ranks, most + 1) if split_points and stages_fit(count, ranks, per_rank)]
    otherwise = "use a model with more blocks"
    if possible:
        nearest = min(possible, key=lambda count: abs(count - number))
        otherwise = f"name {nearest - 1} modules, for {nearest} stages"
    yield Refusal(key, why, _other_stages(job), otherwise)


def stages_fit(number: int, ranks: int, per_rank: int | None) -> bool:
    """Whether ``number`` stages divide over ``ranks``, with ``per_rank`` on each if that is not ``None``."""
    return number == per_rank * ranks if per_rank is not None else number >= ranks and number % ranks == 0


def _other_stages(job: Job) -> Iterator[Option]:
    """Yield other numbers of stages, nearest first; then other schedules, and fewer ranks."""
    keys, ranks = job.section(PipelineKeys), job.mesh.degree("pp")
    if keys.pipeline_parallel_schedule_csv is None:
        if not keys.pipeline_parallel_split_points:
            requested, per_rank = number_of_stages(job, None), schedule_of(job).stages_per_rank
            blocks = job.model.layout.num_blocks
            found = [(stages_of_layers(job, layers), layers) for layers in range(1, blocks + 1)]
            fitting = [
                (number, layers) for number, layers in found if number <= blocks and stages_fit(number, ranks, per_rank)
            ]
            for _, layers in sorted(fitting, key=lambda one: (abs(one[0] - requested), one[1])):
                yield {_LAYERS: layers}
            if keys.pipeline_parallel_layers_per_stage is not None:
                yield dict.fromkeys(_ENDS, 0)
        yield from ({_SCHEDULE: name} for name in _BY_MERIT)
    yield from degrees_below(job, DEGREE)


def _microbatches(job: Job) -> Iterator[Refusal]:
    local, ranks = job.section(TrainingSection).local_batch_size, job.mesh.degree("pp")
    if ranks == 1:
        return
    size, table = job.section(PipelineKeys).pipeline_parallel_microbatch_size, schedule_table(job)
    if local % size:
        why = f"must divide {_LOCAL_BATCH} ({local})"
        sizes: list[Option] = [{_MICROBATCH: one} for one in reversed(divisors(local))]
        yield Refusal(_MICROBATCH, why, sizes, f"change it or {_LOCAL_BATCH}")
        return
    count = microbatches_of(job)
    if table is not None:
        if table.microbatches != count:
            why = f"schedules {table.microbatches} microbatches, and the config has {count} per optimizer step"
            yield Refusal(_CSV, why, _other_microbatches(job), _CHANGE)
        return
    name, needs = job.section(PipelineKeys).pipeline_parallel_schedule, schedule_of(job).needs
    number = number_of_stages(job, None)
    if microbatches_fit(count, needs, number, ranks):
        return
    if needs == "stages":
        why = f"{name} needs at least one microbatch per stage ({number}), and an optimizer step has {count}"
    else:
        why = f"{name} runs microbatches in equal rounds over {ranks} ranks, and an optimizer step has {count}"
    yield Refusal(_SCHEDULE, why, _other_microbatches(job), _CHANGE)


def microbatches_fit(count: int, needs: str, stages: int, ranks: int) -> bool:
    """Whether a schedule with such ``needs`` (:attr:`titan_parallel.pipeline_plan.Schedule.needs`) runs ``count``
    microbatches."""
    if needs == "stages":
        return count >= stages
    return needs == "any" or count % max(1, count // ranks) == 0


def _other_microbatches(job: Job) -> Iterator[Option]:
    """Yield other global batches, with local ones where they must change too; then microbatch sizes, and schedules."""
    size, local, ranks = (
        job.section(PipelineKeys).pipeline_parallel_microbatch_size,
        job.batch.local_size,
        job.batch.ranks,
    )
    table, degree, now = schedule_table(job), job.mesh.degree("pp"), microbatches_of(job)
    number, needs = number_of_stages(job, table), schedule_of(job).needs

    def fits(count: int) -> bool:
        return count == table.microbatches if table is not None else microbatches_fit(count, needs, number, degree)

    most = max(now, number, 0 if table is None else table.microbatches) + local // size + degree
    counts = sorted((count for count in range(1, most + 1) if fits(count)), key=lambda count: (abs(count - now), count))
    whole = [count for count in counts if count * size % local == 0]
    below, above = next((one for one in whole if one < now), None), next((one for one in whole if one > now), None)
    for count in (below, above):
        if count is not None:
            yield {_GLOBAL_BATCH: count * size * ranks}
    yield from ({_MICROBATCH: one} for one in reversed(divisors(local)) if one != size)
    if counts and not whole:
        yield {_LOCAL_BATCH: counts[0] * size, _GLOBAL_BATCH: counts[0] * size * ranks}
    if table is None:
        yield from ({_SCHEDULE: name} for name in _BY_MERIT)


def _compiler(job: Job) -> Iterator[Refusal]:
    section = job.section(CompileSection)
    if splits_backward(job) and section.compiles_blocks:
        # So do torch's schedules. Compiled backward also frees its buffers after the first of the two passes; if it is made
        # to keep them, gradients are wrong (torch 2.15).
        why = (
            "the compiler cannot compute gradients of inputs and of weights separately, as this schedule does: the backward "
            "pass of a compiled block is one function (torch 2.15)"
        )
        has_table = job.section(PipelineKeys).pipeline_parallel_schedule_csv is not None
        options: list[Option] = [{"compile.enable": False}, {"compile.components": ["loss"]}]
        options += [] if has_table else [{_SCHEDULE: name} for name in ("1F1B", "Interleaved1F1B")]
        yield Refusal(_CSV if has_table else _SCHEDULE, why, options)
