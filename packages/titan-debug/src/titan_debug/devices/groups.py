"""Divides the ranks of a job into groups that compute the same with each other's data. Free of torch."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from titan_core.api import JobContext, MeshPlan, Problem
from titan_core.api.config.sections import JobSection, TrainingSection
from titan_debug.config import NumericsSection

Ring = Sequence[Sequence[int]]
"""Groups of ranks, in a ring. With the microbatches of another group, the n-th rank of a group computes what the n-th rank
of that group does: they have the same layers, the same shards of weights, and the same part of each sequence."""


def rings(plan: MeshPlan) -> list[Ring]:
    """Return the groups into which the ranks of a job fall: a ring for each replica of the weights.

    Ranks with the same sequences are in one group: those of tensor, context and pipeline parallelism. So are ranks that
    exchange tokens of different sequences, as experts do: those of a view of the mesh.
    """
    places = list(itertools.product(*(range(plan.degrees[dim.name]) for dim in plan.dims)))
    coordinates = [dict(zip((dim.name for dim in plan.dims), place, strict=True)) for place in places]

    def along(rank: int, *divides: str) -> Hashable:
        return tuple(coordinates[rank][dim.name] for dim in plan.dims if dim.divides in divides)

    ties: list[list[Hashable]] = [[along(rank, "batch") for rank in range(len(places))]]
    for view in plan.views:
        of_view: list[Hashable] = []
        for place in coordinates:
            index = 0
            for name in view.borrows:
                index = index * plan.degrees[name] + place[name]
            others = tuple(place[dim.name] for dim in plan.dims if dim.name not in view.borrows)
            of_view.append((others, index // plan.view_degrees.get(view.name, 1)))
        ties.append(of_view)
    group, before = list(range(len(places))), [-1]  # a rank's group is named for the first rank in it
    while group != before:
        before = group
        for keys in ties:
            first: dict[Hashable, int] = {}
            for key, one in zip(keys, group, strict=True):
                first[key] = min(first.get(key, one), one)
            group = [first[key] for key in keys]
    members: defaultdict[int, list[int]] = defaultdict(list)
    for rank, one in enumerate(group):
        members[one].append(rank)
    found: defaultdict[Hashable, list[list[int]]] = defaultdict(list)
    for ranks in members.values():
        replica = tuple(coordinates[ranks[0]][dim.name] for dim in plan.dims if dim.diverges)
        found[replica].append(ranks)
    return list(found.values())


def why_no_replay(context: JobContext[NumericsSection]) -> tuple[str, str] | None:
    """Return why a step of the job cannot be repeated on other ranks, and what to change; ``None`` if it can."""
    if all(len(ring) == 1 for ring in rings(context.job.mesh)):
        why = f"has no two groups of ranks that hold the same weights ({context.job.mesh})"
        return why, "train on more data-parallel ranks"
    if context.job.section(JobSection).device != "cpu" and not context.job.section(TrainingSection).deterministic:
        return "does not compute the same bits twice on a GPU", 'set training.deterministic = true, or job.device = "cpu"'
    return None


def check(context: JobContext[NumericsSection]) -> Iterator[Problem]:
    """Yield a problem if steps are to be repeated on other ranks, and cannot be. An elastic job has other sizes too."""
    elastic = context.job.section(TrainingSection).elastic
    if context.section.replay_freq and not elastic and (found := why_no_replay(context)):
        why, fix = found
        yield context.config.problem("numerics.replay_freq", f"compares ranks, but this job {why}", f"{fix}, or set it to 0")
