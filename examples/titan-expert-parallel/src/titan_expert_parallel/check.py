"""Checks of a job's config, made before anything is built. Free of torch."""

from collections.abc import Iterator

from titan_core.api.build_context import JobContext
from titan_core.api.errors import Problem
from titan_core.api.layout_rules import Experts
from titan_core.api.sections import ModelSection
from titan_expert_parallel.config import ExpertParallelKeys

DEGREE = "parallelism.expert_parallel_degree"


def check(context: JobContext[ExpertParallelKeys]) -> Iterator[Problem]:
    """Require a model with experts."""
    if not any(isinstance(rule, Experts) for rule in context.facts.model.layout.rules.values()):
        why = f"model {context.facts.section(ModelSection).name!r} has no experts: no rule of its layout is Experts"
        yield context.config.problem(DEGREE, why, "set it to 1")
