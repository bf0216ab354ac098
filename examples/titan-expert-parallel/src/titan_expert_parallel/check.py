"""Checks of a job's config, made before anything is built. Free of torch."""

from collections.abc import Iterator

from titan_core.api import Experts, JobContext, Problem
from titan_expert_parallel.config import ExpertParallelKeys

DEGREE = "parallelism.expert_parallel_degree"


def check(context: JobContext[ExpertParallelKeys]) -> Iterator[Problem]:
    """Require a model with experts."""
    if not any(isinstance(rule, Experts) for rule in context.job.model.layout.rules.values()):
        why = f"model {context.job.model_name!r} has no experts: no rule of its layout is Experts"
        yield context.config.problem(DEGREE, why, "set it to 1")
