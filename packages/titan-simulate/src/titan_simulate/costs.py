"""Costs of a step as the job's transforms and optimizer state them (:mod:`titan_core.api.parallel.planning`).
Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from titan_core.api import Costs, Job, Optimizer, OptimizerCosts, Transform

ADAMW = OptimizerCosts(state_bytes=8.0)
"""The costs of optimizers that do not say theirs."""


def costs_of_optimizer(optimizer: Optimizer, job: Job) -> OptimizerCosts | None:
    """Return what an optimizer says of itself, if it does."""
    return None if optimizer.costs is None else optimizer.costs.call(OptimizerCosts, optimizer.context(job))


def costs_of(transforms: Iterable[Transform], job: Job) -> Iterator[Costs]:
    """Yield the costs of those ``transforms`` that are active in ``job``.

    Raises:
        UserError: a plugin returns something else.
    """
    for transform in transforms:
        context = transform.context(job)
        if transform.planning.costs is None or not transform.active(context):
            continue
        yield transform.planning.costs.call(Costs, context)
