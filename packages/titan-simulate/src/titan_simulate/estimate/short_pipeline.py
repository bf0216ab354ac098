"""A short pipeline that stands for a long one: two ranks, few microbatches, and stages that compute what the long one's do.

What a stage computes for a microbatch depends neither on the number of ranks nor on that of microbatches. So the actions of
two ranks are traced, and those of all ranks follow from the order of the schedule. The two ranks hold as many stages each as
the ranks of the whole pipeline: one rank has its first stage, and one its last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from torch import nn

from titan_core.api import Job, MeshPlan, ModelDefinition, PipelineCosts, UserError
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.costs import costs_of

RANKS = 2
MOST_MICROBATCHES = 4
"""The first, the last, and two between, so that what repeats is seen twice."""
MOST_GATHERED = 3
"""Stages of a rank whose parameters torch's schedules keep gathered (``max_active_stages``, torch 2.11 to 2.15). If a rank
has more, it gathers them again each time that it turns to another stage, which depends on the number of ranks."""
LOCAL_BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"


def microbatches_of(pipeline: PipelineCosts) -> int:
    """Return the number of microbatches of the short pipeline that stands for ``pipeline``."""
    return min(MOST_MICROBATCHES, pipeline.microbatches)


def enough_microbatches(pipeline: PipelineCosts) -> int:
    """Return the number of microbatches after which the memory of a pipeline's ranks repeats; at most its own number.

    Schedules that keep the activations of more microbatches, such as GPipe, need more memory with every one. Of a schedule
    in a file, this is what costs say too: it is for one number of microbatches.
    """
    ranks = max(pipeline.rank_of) + 1
    fewer = min(pipeline.microbatches, 2 * ranks)
    return pipeline.microbatches if pipeline.microbatches % ranks or max(pipeline.alive) > fewer else fewer


def blocks_of_rank(pipeline: PipelineCosts, job: Job, rank: int) -> list[int]:
    """Return the number of blocks of each stage that ``rank`` of the pipeline holds."""
    prefix = f"{job.model.layout.blocks}."
    stages = (names for names, holder in zip(pipeline.stages, pipeline.rank_of, strict=True) if holder == rank)
    return [sum(name.startswith(prefix) for name in names) for names in stages]


def shortened(
    job: AssembledJob, pipeline: PipelineCosts, blocks: int, whole_model: bool = False
) -> AssembledJob | None:  # fmt: skip
    """Return the short pipeline of ``job``; ``None`` if it is short already, if its ranks have more than
    :data:`MOST_GATHERED` stages, or if its stages are fixed by name or in a file so that no shorter one has the like.

    Args:
        blocks: fewest blocks of a stage.
        whole_model: whether the two ranks must divide all blocks, so that the model can be checked.
    """
    ranks = max(pipeline.rank_of) + 1
    along = [dim for dim in job.mesh.dims if dim.divides == "layers" and job.mesh.degrees[dim.name] > 1]
    is_short = ranks < RANKS or (ranks == RANKS and pipeline.microbatches <= MOST_MICROBATCHES)
    if len(along) != 1 or is_short or pipeline.microbatches < RANKS or names_blocks(job):
        return None
    microbatches = microbatches_of(pipeline)
    each = _stages_per_rank(pipeline)
    if max(each) > MOST_GATHERED:
        return None
    key, whole = along[0].degree_key, job.model.layout.num_blocks
    mesh = MeshPlan(job.mesh.dims, {**job.mesh.degrees, along[0].name: RANKS}, job.mesh.views, job.mesh.view_degrees)
    local = microbatches * pipeline.microbatch_size
    batch = replace(
        job.batch, global_size=local * job.batch.ranks, local_size=local, microbatches=1, logical_shards=job.batch.ranks
    )
    data, values = replace(job.data, plan=batch), {key: RANKS, LOCAL_BATCH: local, GLOBAL_BATCH: batch.global_size}
    least = whole if whole_model else -(-whole * RANKS // ranks)
    for number in range(least, whole + 1):
        model, config = first_blocks(job.model, number), job.config.changed(values)
        short = replace(job, mesh=mesh, batch=batch, data=data, model=model, config=config)
        found = _pipeline_of(short)
        if found is None or each != _stages_per_rank(found) or found.microbatches != microbatches:
            continue
        if min(size for rank in range(RANKS) for size in blocks_of_rank(found, short, rank)) >= blocks:
            return short
    return None


def names_blocks(job: Job) -> bool:
    """Whether the config has a key that names blocks by their number, which a model with fewer blocks may lack."""
    return re.search(rf"\b{re.escape(job.model.layout.blocks)}\.\[?\d", str(job.config.as_dict())) is not None


def first_blocks(model: ModelDefinition, number: int) -> ModelDefinition:
    """Return ``model`` with its first ``number`` blocks only."""
    whole, layout = model.build, model.layout

    def build() -> object:
        module: Any = whole()
        blocks = module.get_submodule(layout.blocks)
        for index in reversed(range(number, layout.num_blocks)):
            del blocks[index if isinstance(blocks, nn.ModuleList) else str(index)]
        return module

    dropped = tuple(f"{layout.blocks}.{block}." for block in range(number, layout.num_blocks))
    fewer: dict[str, Any] = {
        field.name: {name: one for name, one in value.items() if not f"{name}.".startswith(dropped)}
        for field in fields(layout)
        if isinstance(value := getattr(layout, field.name), Mapping)
    }
    fewer |= {"num_blocks": number, "block_costs": layout.block_costs[:number]}
    return replace(model, build=build, layout=replace(layout, **fewer))


def _stages_per_rank(pipeline: PipelineCosts) -> set[int]:
    return {pipeline.rank_of.count(rank) for rank in set(pipeline.rank_of)}


def _pipeline_of(job: AssembledJob) -> PipelineCosts | None:
    try:
        return next((one.pipeline for one in costs_of(job.transforms, job) if one.pipeline is not None), None)
    except (UserError, ValueError):  # stages that are cut at a block that the short model lacks
        return None
