"""Checks that a mode of activation checkpointing is possible, run before anything is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api import Job, JobContext, Problem
from titan_parallel.config import ActivationCheckpointSection, CompileSection
from titan_parallel.hints import Option, Refusal, problems

_MODE = "activation_checkpoint.mode"


def check(context: JobContext[ActivationCheckpointSection]) -> Iterator[Problem]:
    """Report a memory budget without the compiler, which enforces it."""
    yield from problems(context.job, _budget)


def _budget(job: Job) -> Iterator[Refusal]:
    compiles = job.section(CompileSection)
    compiled = compiles.enable and "model" in compiles.components and compiles.backend == "inductor"
    if job.section(ActivationCheckpointSection).mode == "memory_budget" and not compiled:
        why = "needs torch.compile with the inductor backend, which enforces the budget"
        components = [*dict.fromkeys(("model", *compiles.components))]
        wanted = {"compile.enable": True, "compile.components": components, "compile.backend": "inductor"}
        changes = {key: value for key, value in wanted.items() if job.config.value(key) != value}
        options: list[Option] = [changes, {_MODE: "selective"}]
        yield Refusal(_MODE, why, options)
