"""Checks of a job's config, made before anything is built. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from titan_core.api import Experts, JobContext, MeshPlan, Problem, Replicate
from titan_experts.config import VIEW, ExpertParallelKeys

DEGREE = "parallelism.expert_parallel_degree"
CAPACITY = "parallelism.expert_parallel_capacity"


def folded(mesh: MeshPlan) -> tuple[str, ...]:
    """Return the dimensions that divide weights and among whose ranks the experts are divided."""
    return next(mesh.folded(view) for view in mesh.views if view.name == VIEW)


def check(context: JobContext[ExpertParallelKeys]) -> Iterator[Problem]:
    """Require a model with experts that tensor parallelism does not divide among the same ranks, and a dispatch that has a
    capacity if one is set."""
    if not any(isinstance(rule, Experts) for rule in context.job.model.layout.rules.values()):
        why = f"model {context.job.model_name!r} has no experts that can be divided: no rule of its layout is Experts"
        yield context.config.problem(DEGREE, why, "set it to 1")
    shared, rules = folded(context.job.mesh), context.job.model.layout.rules
    inside = [pattern for pattern, rule in rules.items() if isinstance(rule, Experts) and rule.within != Replicate()]
    if shared and inside:
        why = f"its ranks include those of {shared[0]}, among which the rule for {inside[0]!r} divides each expert"
        yield context.config.problem(DEGREE, why, "set it to 1, or parallelism.tensor_parallel_degree = 1")
    if context.section.expert_parallel_capacity is not None and context.section.expert_parallel_dispatch != "device":
        why = 'dispatch "alltoall" sends as many rows as there are'
        yield context.config.problem(CAPACITY, why, 'remove it, or set parallelism.expert_parallel_dispatch = "device"')
