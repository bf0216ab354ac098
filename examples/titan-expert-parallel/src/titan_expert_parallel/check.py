"""What makes expert parallelism impossible, found before anything is built. Free of torch."""

from collections.abc import Iterator

from titan_core.api.errors import Problem
from titan_core.api.job_facts import JobFacts
from titan_core.api.layout_rules import Experts

DEGREE = "parallelism.expert_parallel_degree"


def check(facts: JobFacts) -> Iterator[Problem]:
    """The model must have experts."""
    if not any(isinstance(rule, Experts) for rule in facts.model.layout.rules.values()):
        why = f"model {facts.config.value('model.name')!r} has no experts: no rule of its layout is Experts"
        yield facts.config.problem(DEGREE, why, "set it to 1")
