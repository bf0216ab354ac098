"""Checks of a job's config, made before anything is built. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api import Experts, JobContext, Problem
from titan_experts.config import ExpertParallelKeys

DEGREE = "parallelism.expert_parallel_degree"
CAPACITY = "parallelism.expert_parallel_capacity"


def check(context: JobContext[ExpertParallelKeys]) -> Iterator[Problem]:
    """Require a model with experts, and a dispatch that has a capacity if one is set."""
    if not any(isinstance(rule, Experts) for rule in context.job.model.layout.rules.values()):
        why = f"model {context.job.model_name!r} has no experts: no rule of its layout is Experts"
        yield context.config.problem(DEGREE, why, "set it to 1")
    if context.section.expert_parallel_capacity is not None and context.section.expert_parallel_dispatch != "device":
        why = 'dispatch "alltoall" sends as many rows as there are'
        yield context.config.problem(CAPACITY, why, 'remove it, or set parallelism.expert_parallel_dispatch = "device"')
