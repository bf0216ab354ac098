"""Checks that data parallelism and activation checkpointing are possible, run before anything is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan_core.api import Job, JobContext, ModelLayout, Problem
from titan_core.api.config.sections import TrainingSection
from titan_parallel.config import ActivationCheckpointSection, CompileSection, FSDPKeys
from titan_parallel.hints import Option, Refusal, problems


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
