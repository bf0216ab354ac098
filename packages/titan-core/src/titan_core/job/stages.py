"""The jobs of a run's stages, and their checks before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from titan_core.api import Config, Problem, UserError
from titan_core.api.config.sections import DataSection
from titan_core.api.data.dataset import DatasetSpec
from titan_core.api.plugins.assembled_job import AssembledJob, RunStage
from titan_core.config.stages import KEY, in_stage
from titan_core.job.assemble import assemble
from titan_core.job.batch_plan import SHARDS
from titan_core.plugins.registry import Components


def with_stages(job: AssembledJob, registry: Components, missing_ok: bool) -> AssembledJob:
    """Return ``job``, the first stage of a run, with the stages of its config, each of which is assembled to check it.

    Where the global batch changes and ``data.logical_shards`` is not set, it becomes a number that divides each of them.

    Args:
        missing_ok: see :func:`~titan_core.job.assemble.assemble`.

    Raises:
        UserError: a stage is invalid, begins before the one before it, or has another model.
    """
    if not job.config.stages:
        return job
    later = _assembled(job, job.config, registry, missing_ok)
    sizes = [one.batch.global_size for one in (job, *later)]
    if len(set(sizes)) > 1 and job.section(DataSection).logical_shards == 0:
        shards, ranks = gcd(*sizes), max(one.batch.ranks for one in (job, *later))
        if any(shards % one.batch.ranks for one in (job, *later)):
            why = (
                f"the stages have batches of {', '.join(map(str, sizes))} sequences, whose greatest common divisor {shards} "
            )
            why += f"is no multiple of the data-parallel degree {ranks}"
            raise UserError(job.config.problem("training.global_batch_size", why, f"make them multiples of {ranks}"))
        config = job.config.changed({SHARDS: shards})
        job = assemble(config, registry, job.mesh.world_size, missing_ok=missing_ok)
        later = _assembled(job, config, registry, missing_ok)
    for one in later:
        _check_model(job, one)
    _check_datasets([job, *later])
    stages = [RunStage("1", 0, job.config, job.batch.tokens_per_step)]
    for stage, of_stage in zip(job.config.stages, later, strict=True):
        last = stages[-1]
        first = stage.at_step
        if first is None:
            assert stage.at_tokens is not None
            missing = stage.at_tokens - _tokens_before(stages, last.first_step)
            first = last.first_step + -(-missing // last.tokens_per_step)
        if first <= last.first_step:
            why = f"begins after step {first}, and stage {last.name!r} before it after step {last.first_step}"
            raise UserError.one(job.config.where(f"{KEY}: {stage.name}"), why, "give the stages in their order")
        stages.append(RunStage(stage.name, first, stage.config, of_stage.batch.tokens_per_step))
    for number, one in enumerate((job, *later)):
        _check_schedule(replace(one, stages=tuple(stages), stage=number))
    never = [stage.name for stage in stages if stage.first_step >= job.steps]
    notes = [f"stage {name!r} never begins: training.steps = {job.steps}" for name in never]
    return replace(job, stages=tuple(stages), notes=(*job.notes, *notes))


def job_of_stage(job: AssembledJob, number: int, missing_ok: bool = False) -> AssembledJob:
    """Return the job of a stage of ``job``, which is that of the first stage.

    Args:
        missing_ok: see :func:`~titan_core.job.assemble.assemble`.

    Raises:
        UserError: this machine lacks a file that the stage needs.
    """
    if number == 0 and job.stage == 0:
        return job
    stage = job.stages[number]
    assert isinstance(job.registry, Components)
    of_stage = _of_stage(stage.config, stage.name, job, job.registry, missing_ok)
    return replace(of_stage, stages=job.stages, stage=number, restarted=job.restarted)


def assembled_again(job: AssembledJob) -> AssembledJob:
    """Return ``job`` as the first stage of the run, with what has changed in the run's directory (``data.exclude``).

    Raises:
        UserError: the job is no longer valid.
    """
    assert isinstance(job.registry, Components)
    again = with_stages(assemble(job.run_config, job.registry, job.mesh.world_size), job.registry, missing_ok=False)
    return replace(again, restarted=True)


def _assembled(job: AssembledJob, config: Config, registry: Components, missing_ok: bool) -> list[AssembledJob]:
    return [_of_stage(stage.config, stage.name, job, registry, missing_ok) for stage in config.stages]


def _of_stage(config: Config, name: str, job: AssembledJob, registry: Components, missing_ok: bool) -> AssembledJob:
    try:
        return assemble(config, registry, job.mesh.world_size, missing_ok=missing_ok)
    except UserError as error:
        raise in_stage(error, name) from None


def _tokens_before(stages: Sequence[RunStage], step: int) -> int:
    ends = [*(stage.first_step for stage in stages[1:]), step]
    return sum((end - stage.first_step) * stage.tokens_per_step for stage, end in zip(stages, ends, strict=True))


def _check_model(first: AssembledJob, stage: AssembledJob) -> None:
    """
    Raises:
        UserError: the stage has other weights than the first one.
    """
    sizes = [(job.model.num_params, job.model.layout.num_blocks, job.model.layout.dim) for job in (first, stage)]
    if sizes[0] != sizes[1]:
        why = "all stages train the same weights, and these arguments give the model other ones "
        why += f"({stage.model.num_params:,} parameters instead of {first.model.num_params:,})"
        raise UserError(stage.config.problem("model.args", why, "change only arguments that leave the weights as they are"))


def _check_schedule(job: AssembledJob) -> None:
    """
    Raises:
        UserError: the learning-rate schedule does not fit the run.
    """
    check = job.lr_schedule.check
    if check is not None and (problems := check.call_list(Problem, job.lr_schedule.context(job))):
        raise in_stage(UserError(*problems), job.stages[job.stage].name)


def _check_datasets(jobs: Sequence[AssembledJob]) -> None:
    """
    Raises:
        UserError: two stages have different data under one name, by which a source keeps its position.
    """
    found: dict[str, DatasetSpec] = {}
    for job in jobs:
        for dataset in job.data.datasets:
            other = found.setdefault(dataset.name, dataset)
            if _source(dataset) != _source(other):
                paths = f"{dataset.context.path or dataset.context.name} and {other.context.path or other.context.name}"
                why = f"is other data in one stage than in another ({paths}), and a source keeps its position by its name"
                fix = "give the two different names: use data.mixture, whose entries have a name"
                raise UserError(Problem(f"dataset {dataset.name!r}", why, fix))


def _source(dataset: DatasetSpec) -> Any:
    context = dataset.context
    return context.name, context.path, context.split, context.text_field, context.format
