"""What planning a job needs to know of expert parallelism. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titan_core.api import Costs, JobContext, Router
from titan_experts.config import ExpertParallelKeys

DISPATCH = "parallelism.expert_parallel_dispatch"


def choices(context: JobContext[ExpertParallelKeys]) -> Mapping[str, Sequence[Any]]:
    """Return both ways of sending rows, if ranks divide the experts. A capacity needs one of them."""
    if context.section.expert_parallel_degree == 1:
        return {}
    fixed = context.section.expert_parallel_capacity is not None
    return {DISPATCH: ("device",) if fixed else ("alltoall", "device")}


def costs(context: JobContext[ExpertParallelKeys]) -> Costs:
    """Return what a dispatch costs: a wait of the host, or places that stay empty."""
    keys = context.section
    if keys.expert_parallel_dispatch == "alltoall":
        return Costs(host_waits=1.0)
    routers = context.job.model.layout.routers.values()
    share = max((most_share(router, keys) for router in routers), default=most_share(None, keys))
    return Costs(exchanged_rows=keys.expert_parallel_degree * share)


def most_share(router: Router | None, keys: ExpertParallelKeys) -> float:
    """Return the largest share of its rows that a rank can send to one rank, with the dispatch "device".

    By default, the largest number that any choice can require: a token passes through at most as many experts of a rank as
    there are, and at most as many as it chooses.
    """
    ranks = keys.expert_parallel_degree
    share = min(1.0, (keys.expert_parallel_capacity or ranks) / ranks)
    if router is None:
        return share
    return min(share, min(router.per_token, router.experts // ranks) / router.per_token)
