"""Candidate values and costs of these transforms, for planning a job. Imports no torch.

Memory and idle time of the schedules follow the papers that :data:`titan_parallel.pipeline_plan.SCHEDULES` names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from titan_core.api import Costs, Job, JobContext, PipelineCosts
from titan_core.api.config.sections import DataSection, TrainingSection
from titan_parallel.config import (
    HEADS,
    ActivationCheckpointSection,
    ActivationOffloadKeys,
    CompileSection,
    ContextParallelKeys,
    CudaGraphKeys,
    FSDPKeys,
    PipelineKeys,
    TensorParallelKeys,
)
from titan_parallel.pipeline_plan import SCHEDULES, plan_pipeline, schedule_table, splits_backward, stages_of_layers

Choices = Mapping[str, Sequence[Any]]

_LARGEST_MICROBATCH = 8
_MOST_STAGES = 5
"""Stages per rank. More of them idle less and send more."""
_NODE = 8
"""Ranks whose memory symmetric memory maps into each other: those of a node, as most have them."""


def fsdp_choices(context: JobContext[FSDPKeys]) -> Choices:
    """Return whether parameters stay gathered, if data parallelism shards any."""
    mesh = context.job.mesh
    sharded = any(mesh.degrees[name] > 1 for name in mesh.data_dims("shard"))
    other = "always" if mesh.degree("pp") > 1 else "never"
    return {"parallelism.fsdp_reshard_after_forward": ("default", other)} if sharded else {}


def fsdp_costs(context: JobContext[FSDPKeys]) -> Costs:
    """Return what stays gathered. Torch's pipeline stages reduce gradients after the last microbatch."""
    policy, pipelined = context.section.fsdp_reshard_after_forward, context.job.mesh.degree("pp") > 1
    return Costs(
        parameters_stay=policy == "never" or (policy == "default" and pipelined),
        gradients_stay=pipelined,
        blocks_alike=not _gathers_blocks_together(context),
    )


def _gathers_blocks_together(context: JobContext[FSDPKeys]) -> bool:
    """Whether blocks may be small enough for ``fsdp_group_mib``, so that the cost of one depends on their number."""
    mesh, model = context.job.mesh, context.job.model
    divided = math.prod(mesh.degrees[dim.name] for dim in mesh.dims if dim.divides == "weights")
    block = 2 * model.num_params / divided / max(1, model.layout.num_blocks)
    return block < 4 * context.section.fsdp_group_mib * 2**20  # the embedding is in the mean, too


def tensor_choices(context: JobContext[TensorParallelKeys]) -> Choices:
    """Return that matmuls and collectives overlap, if they can: in compiled blocks, on ranks of a node. In pieces, a
    collective takes as long as at once, so that what a matmul hides of it is gained."""
    degree = context.job.mesh.degree("tp")
    if degree == 1:
        return {}
    overlap = (
        context.job.section(CompileSection).compiles_blocks
        and degree <= _NODE
        and not context.section.disable_sequence_parallel
    )
    return {"parallelism.enable_async_tensor_parallel": (overlap,)}


def tensor_costs(context: JobContext[TensorParallelKeys]) -> Costs:
    """Return whether collectives and matmuls overlap. The mesh dimension says what else changes."""
    return Costs(overlaps_matmuls=context.section.enable_async_tensor_parallel)


def context_choices(context: JobContext[ContextParallelKeys]) -> Choices:
    """Return how keys and values are exchanged, if rings divide the sequence. Within documents, they are always gathered."""
    mesh = context.job.mesh
    rings = mesh.degree("cp") > mesh.degree(HEADS.name) and not context.job.section(DataSection).document_mask
    return {"parallelism.context_parallel_rotate_method": ("allgather", "alltoall")} if rings else {}


def pipeline_choices(context: JobContext[PipelineKeys]) -> Choices:
    """Return schedules that no other one dominates, numbers of stages, and sizes of microbatches that leave enough of
    them."""
    job, keys = context.job, context.section
    degree, blocks = job.mesh.degree("pp"), job.model.layout.num_blocks
    if degree == 1 or keys.pipeline_parallel_schedule_csv is not None:
        return {}
    compiled = job.section(CompileSection).compiles_blocks
    only_split = _plans_split_backward(job)
    local = job.section(TrainingSection).local_batch_size
    total = job.batch.microbatches * local
    sizes = [size for size in range(1, min(local, _LARGEST_MICROBATCH) + 1) if local % size == 0 and total >= degree * size]
    offered: dict[str, Sequence[Any]] = {
        # GPipe and LoopedBFS idle as 1F1B and Interleaved1F1B do, and keep more activations.
        "parallelism.pipeline_parallel_schedule": [
            name
            for name, schedule in SCHEDULES.items()
            if name not in ("GPipe", "LoopedBFS", "DualPipeV")
            and not (schedule.splits_backward if compiled else only_split and not schedule.splits_backward)
            and degree * (schedule.stages_per_rank or 2) <= blocks
        ],
        "parallelism.pipeline_parallel_microbatch_size": sizes or [1],
    }
    if not keys.pipeline_parallel_split_points:
        offered["parallelism.pipeline_parallel_layers_per_stage"] = [None, *_layers_of_more_stages(job)]
    return offered


def _layers_of_more_stages(job: Job) -> list[int]:
    """Return the numbers of layers per stage that give each rank more stages than the two of the default."""
    degree, blocks = job.mesh.degree("pp"), job.model.layout.num_blocks
    layers: dict[int, int] = {}
    for number in range(blocks, 0, -1):
        stages = stages_of_layers(job, number)
        if stages % degree == 0 and 2 < stages // degree <= _MOST_STAGES and stages <= blocks:
            layers.setdefault(stages, number)
    return list(layers.values())


def pipeline_costs(context: JobContext[PipelineKeys]) -> Costs:
    """Return the stages, and what their schedule keeps and waits for."""
    job = context.job
    plan = plan_pipeline(job)
    degree = job.mesh.degree("pp")
    alive, idle = _schedule(job, plan.microbatches, len(plan.stages) / degree)
    size = context.section.pipeline_parallel_microbatch_size
    return Costs(
        pipeline=PipelineCosts(
            stages=plan.stages,
            rank_of=plan.rank_of,
            microbatch_size=size,
            microbatches=plan.microbatches,
            alive=tuple(min(float(plan.microbatches), most) for most in alive),
            idle=idle,
        )
    )


def _schedule(job: Job, microbatches: int, laps: float) -> tuple[list[float], float]:
    """Return, for a pipeline of ``laps`` stages per rank, the microbatches alive on each rank, and the idle time relative to
    the time of computation."""
    degree = job.mesh.degree("pp")
    name = job.section(PipelineKeys).pipeline_parallel_schedule
    later = [degree - 1 - rank for rank in range(degree)]
    if schedule_table(job) is None and name == "1F1B":
        alive = [1.0 + rank for rank in later]
    elif schedule_table(job) is None and name.startswith("Interleaved"):
        alive = [((laps - 1) * degree + 2 * rank + 1) / laps for rank in later]
    elif SCHEDULES[name].order == "v":
        alive = [float(degree)] * degree
    else:
        alive = [float(microbatches)] * degree
    idle = (degree - 1) / (microbatches * laps)
    # Weight gradients, a third of the work, fill what other schedules wait for.
    return alive, idle / 3 if splits_backward(job) else idle


def recomputation_choices(context: JobContext[ActivationCheckpointSection]) -> Choices:
    """Return the modes, unless the config requests a memory budget, which is a choice of its own. Schedules that split the
    backward pass would recompute twice, and keep what they have recomputed in between."""
    mode = context.section.mode
    modes = ("none",) if _plans_split_backward(context.job) else ("none", "selective", "full")
    return {} if mode == "memory_budget" else {"activation_checkpoint.mode": modes}


def _plans_split_backward(job: Job) -> bool:
    """Whether a plan considers the job only for schedules that split the backward pass: it also tries compiled blocks, which
    are faster and which they exclude, unless the command line forbids it."""
    compiled = job.section(CompileSection).compiles_blocks
    return job.mesh.degree("pp") > 1 and not compiled and "compile.enable" not in job.config.overridden


def recomputation_costs(context: JobContext[ActivationCheckpointSection]) -> Costs:
    """Return whether blocks remain alike: not if only every second or third one is recomputed."""
    section = context.section
    layers = section.mode == "selective" and section.selective_ac_option not in ("op", "1")
    return Costs(blocks_alike=not layers)


def offload_costs(context: JobContext[ActivationOffloadKeys]) -> Costs:
    """Return that blocks do not remain alike: the memory of one is freed while the next one computes."""
    return Costs(blocks_alike=False)


def compile_choices(context: JobContext[CompileSection]) -> Choices:
    """Return whether to compile. It costs nothing but the schedules that it excludes."""
    return {"compile.enable": (True, False) if context.job.mesh.degree("pp") > 1 else (True,)}


def graph_costs(context: JobContext[CudaGraphKeys]) -> Costs:
    """Return that the host launches forward and backward pass at once."""
    return Costs(graphed=True)


def compile_costs(context: JobContext[CompileSection]) -> Costs:
    """Return what is fused: intermediates between pointwise operators are not written."""
    return Costs(fused="model" in context.section.components, fused_loss="loss" in context.section.components)
