"""What makes a way of recomputation impossible, found before anything is built. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api.build_context import JobContext
from titan_core.api.errors import Problem
from titan_parallel.config import ActivationCheckpointSection, CompileSection


def check(context: JobContext[ActivationCheckpointSection]) -> Iterator[Problem]:
    """A memory budget is the compiler's to keep."""
    compiles = context.facts.section(CompileSection)
    compiled = compiles.enable and "model" in compiles.components and compiles.backend == "inductor"
    if context.section.mode == "memory_budget" and not compiled:
        why = "it is torch.compile's inductor backend that keeps a budget"
        fix = 'set compile.enable = true (and leave compile.backend and components as they are), or mode = "selective"'
        yield context.config.problem("activation_checkpoint.mode", why, fix)
