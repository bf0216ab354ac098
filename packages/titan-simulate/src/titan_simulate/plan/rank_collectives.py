"""The collectives of a rank's step, in seconds. The docstring of each term is its formula. Free of torch."""

from __future__ import annotations

import math

from titan_core.api import Mixer, PipelineCosts
from titan_simulate.plan.groups import Group, group_along
from titan_simulate.plan.rank_share import RankShare
from titan_simulate.plan.workload import Workload


def waits_of(rank: RankShare, matmuls: float, attention: float) -> dict[str, float]:
    """Return collectives that nothing hides, by dimension and view."""
    found = {}
    for dim in rank.mesh.dims:
        if rank.mesh.degrees[dim.name] < 2:
            continue
        group = group_along(rank.machine, rank.mesh, [dim.name])
        if dim.divides == "weights":
            found[dim.name] = _regions(rank, group, matmuls)
        elif dim.divides == "sequence":
            found[dim.name] = _keys(rank, dim.name, attention) + _heads(rank, dim.name)
        elif dim.divides == "layers" and rank.job.pipeline is not None:
            found[dim.name] = _stages(rank, group, rank.job.pipeline)
    for view in rank.mesh.views:
        degree = rank.mesh.view_degrees[view.name]
        if degree > 1 and view.shards_parameters:
            found[view.name] = _exchanged_experts(rank, group_along(rank.machine, rank.mesh, view.borrows, degree))
    return found


def _regions(rank: RankShare, group: Group, matmuls: float) -> float:
    """Features are gathered before each region of a block, and reduced after it; likewise before the head. Matmuls hide
    it, if they overlap, except for the share of one rank."""
    calls = rank.passes * (sum(unit.regions * count for unit, count in rank.blocks) + 1)
    seconds = group.seconds(rank.tokens * rank.sizes.dim * rank.width * calls, calls)
    hidden = min(seconds, matmuls) * (1 - 1 / group.ranks) if rank.job.overlaps_matmuls else 0.0
    return seconds - hidden


def _keys(rank: RankShare, dim: str, attention: float) -> float:
    """Keys and values of a rank's positions go to all ranks that divide the sequence (:func:`exchange_seconds`). Ranks
    that exchange heads do so first, and then hold a share of the heads, of the positions of all of them."""
    if rank.ring == 1:
        return 0.0
    features = sum(rank.keys_of(unit) * count for unit, count in rank.blocks) / rank.weights
    group = group_along(rank.machine, rank.mesh, [dim], stride=rank.job.exchanges_heads)
    return exchange_seconds(rank.job, group, rank.tokens * features * rank.count, rank.laps * rank.count, attention)


def _heads(rank: RankShare, dim: str) -> float:
    """Queries, keys and values are exchanged before attention, and its results after it; likewise their gradients."""
    degree = rank.job.exchanges_heads
    group = group_along(rank.machine, rank.mesh, [dim], degree)
    features = sum(_traded(rank, mixer) * count for unit, count in rank.blocks for mixer in unit.mixers)
    passes = (2 + rank.job.recomputed) * rank.count
    return group.exchange(rank.tokens * features * rank.width * passes, 2 * rank.laps * passes)


def _traded(rank: RankShare, mixer: Mixer) -> float:
    """Return the features of a position of which a rank gives the other ranks theirs. Key heads are repeated if they are
    too few."""
    if mixer.heads is None or mixer.key_heads is None:
        return 0.0
    keys = math.lcm(max(1, mixer.key_heads // rank.weights), rank.job.exchanges_heads)
    return rank.sizes.dim * (2 / rank.weights + 2 * keys / mixer.heads)


def _stages(rank: RankShare, group: Group, pipeline: PipelineCosts) -> float:
    """Hidden states pass on from stage to stage, and their gradients back."""
    crossings = 2 * len(pipeline.stages) / group.ranks * rank.count
    return group.passing(rank.tokens * rank.sizes.states * rank.sizes.dim * rank.width * crossings, crossings)


def _exchanged_experts(rank: RankShare, group: Group) -> float:
    """``tokens x chosen experts x width``, of which ``(ranks - 1) / ranks`` leave the rank, are sent to their experts,
    and the results back. The busiest rank receives more, unless buffers have a fixed size."""
    routed = sum(unit.routed * count for unit, count in rank.blocks) / rank.weights
    rows = rank.imbalance if rank.job.exchanged_rows is None else rank.job.exchanged_rows
    calls = rank.passes * sum(count for unit, count in rank.blocks if unit.routed)
    return group.exchange(rank.tokens * routed * rank.width * rank.passes * rows, calls)


def data_parallel_of(rank: RankShare, compute: float) -> dict[str, float]:
    """Return by how much gathers and reductions take longer than ``compute``, which hides them, by dimensions.

    Sharded: ``parameters x (gathers x width + reductions x bytes of a gradient)``; replicated: twice the gradients of a
    shard. A microbatch gathers twice and reduces once, unless parameters or gradients stay.
    """
    job, mesh = rank.job, rank.mesh
    gathers = 1.0 if job.parameters_stay else 2.0 * rank.count
    reductions = 1.0 if job.gradients_stay else float(rank.count)
    reduced = rank.whole * job.reduce_bytes + rank.exact * max(0, 4 - job.reduce_bytes)
    gathered = rank.whole * rank.width + rank.exact * max(0, 4 - rank.width)
    size = {
        "shard": gathers * gathered + reductions * reduced,
        "replicate": 2 * reduced / rank.shards * reductions,
    }
    calls = {"shard": (gathers + reductions) * rank.laps, "replicate": reductions * rank.laps}
    longer, free = {}, compute
    for how in ("shard", "replicate"):
        names = mesh.data_dims(how)
        seconds = group_along(rank.machine, mesh, names).seconds(size[how], calls[how])
        if seconds > free:
            longer["+".join(name for name in names if mesh.degrees[name] > 1)] = seconds - free
        free = max(0.0, free - seconds)
    return longer


def exchange_seconds(job: Workload, group: Group, features: float, exchanges: float, attention: float) -> float:
    """Return the time of exchanging keys and values that attention does not hide. Their gradients are summed in fp32.

    Args:
        features: of the keys and values of a rank's positions, of all blocks and microbatches.
        exchanges: forward passes of a block.
        attention: seconds, in all passes.
    """
    ranks, passes = group.ranks, 2 + job.recomputed
    forward, sums = features * job.parameter_bytes * passes, features * 4
    if job.passes_keys:
        hops = (ranks - 1) * (passes + 1) * exchanges
        return max(0.0, group.passing((forward + sums) * (ranks - 1), hops) - attention * (ranks - 1) / ranks)
    gathered = group.seconds(forward * ranks, passes * exchanges)
    return max(0.0, gathered - attention / ranks) + group.seconds(sums * ranks, exchanges)
