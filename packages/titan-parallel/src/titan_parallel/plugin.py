"""The components that titan-parallel registers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from titan_core.api import DATA_DIMS, Checks, MeshUse, Phase, Planning, Ref, StepUse, Transform, hookimpl
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_parallel.checks import is_active, refuse_waits_in_graphs
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
from titan_parallel.slots import COMPILER_OPTIONS, PARTIAL_GRADIENTS, REGION_CASTS, SAVE_POLICIES

api = (1, 0)


def _planning(name: str, faster_first: Mapping[str, Sequence[Any]] = MappingProxyType({})) -> Planning:
    choices, costs = (Ref[Any](f"titan_parallel.planning:{name}_{what}") for what in ("choices", "costs"))
    return Planning(choices=choices, costs=costs, faster_first=faster_first)


@hookimpl
def titan_parallelisms() -> list[Transform]:
    return [
        Transform(
            name="fsdp",
            summary="data parallelism: FSDP2, HSDP, DDP; mixed precision; CPU offload",
            config=FSDPKeys,
            phase=Phase.DATA,
            active=is_active,
            serves=(
                "parallelism.data_parallel_replicate_degree",
                "parallelism.data_parallel_shard_degree",
                "training.mixed_precision_param",
                "training.mixed_precision_reduce",
                "training.enable_cpu_offload",
            ),
            mesh=MeshUse(sums=(DATA_DIMS,)),
            check=Ref("titan_parallel.checks:check_data_parallel"),
            apply=Ref("titan_parallel.fsdp:apply"),
            planning=_planning("fsdp"),
        ),
        Transform(
            name="pipeline_parallel",
            summary="the model in stages, run by torch's schedules",
            config=PipelineKeys,
            phase=Phase.PIPELINE,
            active=lambda context: context.job.mesh.degree("pp") > 1,
            serves=("parallelism.pipeline_parallel_degree",),
            check=Ref("titan_parallel.pipeline_check:check"),
            checks=Checks(model=Ref("titan_parallel.model_checks:check_pipeline")),
            apply=Ref("titan_parallel.pipeline:apply"),
            steps=StepUse(runner=Ref("titan_parallel.pipeline:make_step")),
            planning=_planning("pipeline"),
        ),
        Transform(
            name="tensor_parallel",
            summary="tensor, sequence and loss parallelism",
            config=TensorParallelKeys,
            phase=Phase.TENSOR,
            active=lambda context: context.job.mesh.degree("tp") > 1,
            serves=("parallelism.tensor_parallel_degree",),
            reads=(REGION_CASTS, PARTIAL_GRADIENTS),
            check=Ref("titan_parallel.tensor_parallel_check:check"),
            checks=Checks(model=Ref("titan_parallel.model_checks:check_tensor")),
            apply=Ref("titan_parallel.tensor_parallel:apply"),
            steps=StepUse(observer=Ref("titan_parallel.partial_gradients:observe")),
            planning=_planning("tensor"),
        ),
        Transform(
            name="context_parallel",
            summary="each sequence divided over ranks, with exact attention over all of it",
            config=ContextParallelKeys,
            phase=Phase.CONTEXT,
            active=lambda context: context.job.mesh.degree("cp") > 1,
            serves=("parallelism.context_parallel_degree",),
            mesh=MeshUse(views=(HEADS,)),
            check=Ref("titan_parallel.context_parallel_check:check"),
            checks=Checks(model=Ref("titan_parallel.model_checks:check_context")),
            apply=Ref("titan_parallel.context_parallel:apply"),
            planning=Planning(choices=Ref("titan_parallel.planning:context_choices")),
        ),
        Transform(
            name="activation_checkpoint",
            summary="activation checkpointing: full, every N-th block, selective by operator, or within a memory budget",
            config=ActivationCheckpointSection,
            phase=Phase.RECOMPUTE,
            active=lambda context: context.section.mode != "none",
            reads=(SAVE_POLICIES,),
            check=Ref("titan_parallel.checks:check_recomputation"),
            apply=Ref("titan_parallel.activation_checkpoint:apply"),
            planning=_planning("recomputation", {"activation_checkpoint.mode": ("none", "selective", "full")}),
        ),
        Transform(
            name="activation_offload",
            summary="activations in host memory until backward needs them",
            config=ActivationOffloadKeys,
            phase=Phase.RECOMPUTE,
            active=lambda context: context.section.offload_share > 0,
            check=Ref("titan_parallel.checks:check_offload"),
            apply=Ref("titan_parallel.activation_offload:apply"),
            planning=Planning(costs=Ref("titan_parallel.planning:offload_costs")),
        ),
        Transform(
            name="compile",
            summary="torch.compile of each block and of the loss",
            config=CompileSection,
            phase=Phase.COMPILE,
            active=lambda context: context.section.enable,
            reads=(COMPILER_OPTIONS,),
            apply=Ref("titan_parallel.compile:apply"),
            steps=StepUse(observer=Ref("titan_parallel.compile:observe")),
            planning=_planning("compile", {"compile.enable": (True, False)}),
        ),
        Transform(
            name="cuda_graphs",
            summary="CUDA graphs: a step's forward and backward passes launched at once",
            config=CudaGraphKeys,
            phase=Phase.COMPILE,
            active=lambda context: not context.section.disable_cuda_graphs,
            check=Ref("titan_parallel.checks:check_cuda_graphs"),
            planning=Planning(costs=Ref("titan_parallel.planning:graph_costs")),
            steps=StepUse(
                runner=Ref("titan_parallel.cuda_graphs:make_step"), observer=Ref("titan_parallel.cuda_graphs:observe")
            ),
        ),
    ]


@hookimpl
def titan_job_assembled(job: AssembledJob) -> None:
    """Refuse CUDA graphs of steps that wait. Keep NCCL from registering the memory of others, which ends in illegal accesses
    where the allocator extends its segments, as Titan lets it (pytorch/pytorch#158029)."""
    refuse_waits_in_graphs(job)
    if not job.config.section(CudaGraphKeys).disable_cuda_graphs:
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
