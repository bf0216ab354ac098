"""Checks that data parallelism, activation checkpointing, offloading and CUDA graphs are possible, run before anything is
built. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan_core.api import Costs, Job, JobContext, ModelLayout, Problem, UserError
from titan_core.api.config.sections import DataSection, TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_parallel.config import (
    ActivationCheckpointSection,
    ActivationOffloadKeys,
    CompileSection,
    CudaGraphKeys,
    FSDPKeys,
    TensorParallelKeys,
)
from titan_parallel.hints import Option, Refusal, problems
from titan_parallel.pipeline_plan import number_of_stages, schedule_table


def is_active(context: JobContext[Any]) -> bool:
    """Whether ranks train on different tokens, or one device needs mixed precision or CPU offload."""
    training, mesh = context.job.section(TrainingSection), context.job.mesh
    on_one_device = training.mixed_precision_param != "float32" or training.enable_cpu_offload
    return mesh.data_degree > 1 or on_one_device


def check_data_parallel(context: JobContext[FSDPKeys]) -> Iterator[Problem]:
    """Report tied parameters that FSDP does not gather together. It gathers embedding and head together, and each block."""
    layout = context.job.model.layout
    for name, source in layout.tied.items():
        if _unit_of(name, layout) != _unit_of(source, layout):
            why = f"its layout ties {name!r} to {source!r}, and FSDP gathers the two separately"
            fix = "tie parameters only within a block or between embedding and head, or train on one device in float32"
            yield context.config.problem("model.name", why, fix)


def _unit_of(parameter: str, layout: ModelLayout) -> str:
    """Return the number of the block that contains ``parameter``, or ``""`` if none does."""
    rest = parameter.removeprefix(f"{layout.blocks}.")
    return rest.partition(".")[0] if rest != parameter else ""


_MODE = "activation_checkpoint.mode"


def check_recomputation(context: JobContext[ActivationCheckpointSection]) -> Iterator[Problem]:
    """Report a memory budget without the compiler, which enforces it."""
    yield from problems(context.job, _budget)


def _budget(job: Job) -> Iterator[Refusal]:
    compiles = job.section(CompileSection)
    compiled = compiles.compiles_blocks and compiles.backend == "inductor"
    if job.section(ActivationCheckpointSection).mode == "memory_budget" and not compiled:
        why = "needs torch.compile with the inductor backend, which enforces the budget"
        components = [*dict.fromkeys(("model", *compiles.components))]
        wanted = {"compile.enable": True, "compile.components": components, "compile.backend": "inductor"}
        changes = {key: value for key, value in wanted.items() if job.config.value(key) != value}
        options: list[Option] = [changes, {_MODE: "selective"}]
        yield Refusal(_MODE, why, options)


_OFFLOAD = "activation_checkpoint.offload_share"


def check_offload(context: JobContext[ActivationOffloadKeys]) -> Iterator[Problem]:
    """Report a job in which no block could be offloaded."""
    yield from problems(context.job, _has_other_blocks)


def _has_other_blocks(job: Job) -> Iterator[Refusal]:
    stages = 1 if job.mesh.degree("pp") == 1 else number_of_stages(job, schedule_table(job))
    if job.section(ActivationOffloadKeys).offload_share > 0 and job.model.layout.num_blocks <= stages:
        where = "the model" if stages == 1 else f"each of {stages} pipeline stages"
        why = f"the last block of {where} stays on the device, and there is no other"
        yield Refusal(_OFFLOAD, why, [{_OFFLOAD: 0.0}])


_GRAPHS = "training.disable_cuda_graphs"


def check_cuda_graphs(context: JobContext[CudaGraphKeys]) -> Iterator[Problem]:
    """Report what a CUDA graph of a step cannot contain."""
    yield from problems(context.job, _recordable)


def _recordable(job: Job) -> Iterator[Refusal]:
    if job.section(CudaGraphKeys).disable_cuda_graphs:
        return
    recompute = job.section(ActivationCheckpointSection).mode
    alternatives: list[tuple[bool, str, Option]] = [
        (
            job.mesh.degree("pp") > 1,
            "a pipeline's schedule runs on the host, between stages that send and receive",
            {"parallelism.pipeline_parallel_degree": 1},
        ),
        (
            job.section(TrainingSection).enable_cpu_offload,
            "with CPU offload the host waits for the gradients of each block",
            {"training.enable_cpu_offload": False},
        ),
        (
            job.section(DataSection).document_mask and job.section(DataSection).document_attention == "varlen",
            "variable-length attention receives other shapes in each step",
            {"data.document_attention": "flex"},
        ),
        (
            recompute != "none" and not job.section(CompileSection).compiles_blocks,
            "recomputation without the compiler reads the state of the random generator, which a recording forbids",
            {"compile.enable": True},
        ),
        (
            job.section(ActivationOffloadKeys).offload_share > 0,
            "copies of activations to the host in a graph are untested",
            {_OFFLOAD: 0.0},
        ),
        (
            job.section(TensorParallelKeys).enable_async_tensor_parallel,
            "symmetric memory in a graph is untested",
            {"parallelism.enable_async_tensor_parallel": False},
        ),
    ]
    for found, why, change in alternatives:
        if found:
            yield Refusal(_GRAPHS, f"{why}, so the step cannot be a CUDA graph", [{_GRAPHS: True}, change])


def refuse_waits_in_graphs(job: AssembledJob) -> None:
    """Refuse CUDA graphs of a job in which the host waits for the device within a step, as some expert parallelism does.

    Raises:
        UserError: it does.
    """
    if job.section(CudaGraphKeys).disable_cuda_graphs:
        return
    for transform in job.transforms:
        if transform.planning.costs is not None and transform.planning.costs.call(Costs, transform.context(job)).host_waits:
            why = f"{transform.name} makes the host wait for the device within a step, which a CUDA graph cannot"
            raise UserError(job.config.problem(_GRAPHS, why, f"set {_GRAPHS} = true, or use a setting of it without waits"))
