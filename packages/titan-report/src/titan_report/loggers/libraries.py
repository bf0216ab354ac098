"""Whether the libraries of metric loggers are installed. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from titan_core.api.errors import Problem
from titan_core.api.job_facts import JobFacts


def check_tensorboard(facts: JobFacts) -> Iterator[Problem]:
    """For ``metrics.enable_tensorboard``."""
    return _check(facts, "tensorboard")


def check_wandb(facts: JobFacts) -> Iterator[Problem]:
    """For ``metrics.enable_wandb``."""
    return _check(facts, "wandb")


def _check(facts: JobFacts, library: str) -> Iterator[Problem]:
    if find_spec(library) is None:
        why, fix = f"the package {library} is not installed", f"install titan-report[{library}]"
        yield facts.config.problem(f"metrics.enable_{library}", why, fix)
