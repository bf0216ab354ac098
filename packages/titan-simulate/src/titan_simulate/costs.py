"""What the transforms of a job say about its step (:mod:`titan_core.api.planning`). Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from titan_core.api.components import Transform
from titan_core.api.errors import UserError
from titan_core.api.job_facts import JobFacts
from titan_core.api.planning import Costs
from titan_core.api.tools.shown import show


def costs_of(transforms: Iterable[Transform], facts: JobFacts) -> Iterator[Costs]:
    """Yield the costs of those ``transforms`` that are active in a job with these ``facts``.

    Raises:
        UserError: a plugin returns something else.
    """
    for transform in transforms:
        context = transform.context(facts)
        if transform.costs is None or not transform.active(context):
            continue
        costs = transform.costs.load()(context)
        if not isinstance(costs, Costs):
            why = f"its costs returned {show(str(costs))}; it must return Costs"
            raise UserError.one(f"transform {transform.name!r}", why, "fix or update its plugin")
        yield costs
