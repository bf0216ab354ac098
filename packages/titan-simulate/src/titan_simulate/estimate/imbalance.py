"""Experts that are not chosen evenly: the time of the busiest rank, for which the others wait. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from titan_core.api import Experts, Job, matches
from titan_simulate.engine.names import is_grouped
from titan_simulate.estimate.work import Data, Work


def divides_experts(job: Job) -> bool:
    """Whether ranks divide the experts among them, so that one can have more rows than another."""
    return any(job.mesh.view_degrees[view.name] > 1 for view in job.mesh.views if view.shards_parameters)


def busiest(trace: Sequence[Work], job: Job, imbalance: float, fixed: bool) -> list[Work]:
    """Return ``trace`` as that of the rank whose experts compute ``imbalance`` times as many rows as the mean. Its memory is
    that of an even choice.

    Args:
        fixed: whether ranks exchange a fixed number of rows, so that the busiest one only multiplies more of them.
    """
    rules = job.model.layout.rules.items()
    owners = [pattern.rpartition(".")[0] for pattern, rule in rules if isinstance(rule, Experts)]
    if imbalance == 1.0 or not divides_experts(job):
        return list(trace)
    return [
        _scaled(work, imbalance) if _has_rows(work, fixed) and matches(work.module, owners) else work for work in trace
    ]  # fmt: skip


def _has_rows(work: Work, fixed: bool) -> bool:
    """Whether ``work`` grows with the rows, and is not FSDP's."""
    return is_grouped(work.name) if fixed else not work.name.startswith(("fsdp::", "c10d::"))


def _scaled(work: Work, factor: float) -> Work:
    def grown(data: Sequence[Data]) -> tuple[Data, ...]:
        return tuple(Data(one.storage, int(one.bytes * factor)) for one in data)

    return replace(
        work, flops=int(work.flops * factor), bytes=int(work.bytes * factor), reads=grown(work.reads),
        writes=grown(work.writes),
    )  # fmt: skip
