"""Refuses settings without which muP transfers nothing. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api import JobContext, OptimizerSection, Problem
from titan_optim.config import MUP_OPTIMIZER, MuPSection


def check(context: JobContext[MuPSection]) -> Iterator[Problem]:
    """Yield a problem for each setting that contradicts the rules."""
    config = context.job.config
    if (name := context.job.section(OptimizerSection).name) != MUP_OPTIMIZER:
        why = f"the learning rates of widths need optimizer.name = {MUP_OPTIMIZER!r}, not {name!r}"
        yield config.problem("mup.base", why, f"set optimizer.name = {MUP_OPTIMIZER!r}, or remove mup.base")
    tied = context.job.model.layout.tied
    if tied:
        why = f"{next(iter(tied))} is tied to {next(iter(tied.values()))}, and one weight cannot follow the rules of both"
        yield config.problem("mup.base", why, "untie them (for most models: --model.args.tie_embeddings false)")
