"""Checks that a mode of activation checkpointing is possible, run before anything is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api.build_context import JobContext
from titan_core.api.errors import Problem
from titan_parallel.config import ActivationCheckpointSection, CompileSection


def check(context: JobContext[ActivationCheckpointSection]) -> Iterator[Problem]:
    """Report a memory budget without the compiler, which enforces it."""
    compiles = context.facts.section(CompileSection)
    compiled = compiles.enable and "model" in compiles.components and compiles.backend == "inductor"
    if context.section.mode == "memory_budget" and not compiled:
        why = "needs torch.compile with the inductor backend, which enforces the budget"
        fix = 'set compile.enable = true (with the default compile.backend and components), or mode = "selective"'
        yield context.config.problem("activation_checkpoint.mode", why, fix)
