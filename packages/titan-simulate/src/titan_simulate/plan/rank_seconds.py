"""The terms of the time of a rank's step, in seconds. The docstring of each is its formula. Free of torch."""

from __future__ import annotations

import math

from titan_simulate.plan.groups import group_along
from titan_simulate.plan.rank_collectives import data_parallel_of, waits_of
from titan_simulate.plan.rank_share import RankShare
from titan_simulate.plan.workload import views

_OPERATORS = 160
"""Operators of a block, forward and backward, that an eager host issues; a compiled block has a fifth of them."""


def seconds_of(rank: RankShare) -> dict[str, float]:
    """Return seconds by kind; names of mesh dimensions and views for their collectives."""
    matmuls, attention = _matmuls(rank), _attention(rank)
    compute = matmuls + attention + _pointwise(rank)
    recomputation = compute * (1 - 1 / rank.again)
    found = {
        "compute": compute - recomputation,
        "recomputation": recomputation,
        "host": max(0.0, _issue(rank) - compute) + _host_waits(rank),
        **waits_of(rank, matmuls, attention),
    }
    if rank.job.pipeline is not None:
        found["idle"] = sum(found.values()) * rank.job.pipeline.idle
    for name, longer in data_parallel_of(rank, compute).items():
        found[name] = found.get(name, 0.0) + longer
    found["update"] = _update(rank)
    return found


def _matmuls(rank: RankShare) -> float:
    """Those of blocks at the rate of their type, with recomputation; those of embedding and head once."""
    job, units = rank.job, rank.units
    sizes = job.matmul_type, rank.weights, rank.tokens, views(job.mesh), rank.width, rank.imbalance
    of_blocks = sum(units.block_seconds(kind, *sizes) * count for kind, count in rank.held.blocks)
    share = sum(units.flops[kind] for kind in rank.held.others)
    others = share * rank.sizes.matmul_flops * rank.tokens * rank.count / rank.weights
    rate = rank.machine.matmul_of(job.wide_type).achievable_tflops * 1e12
    return of_blocks * (rank.count * rank.again) + others / rate


def _attention(rank: RankShare) -> float:
    """``forward x (1 + recomputed) / rate of forward + 2.5 x forward / rate of backward``: of a triangle, forward is a
    sixth of what a model's definition counts for mixers, and backward 2.5 times that."""
    rates, blocks = rank.machine.attention, max(1, len(rank.sizes.blocks))
    forward = rank.sizes.mixer_flops * (rank.tokens * rank.count / rank.weights) * rank.laps / blocks / 6
    seconds = forward * (1 + rank.job.recomputed) / (rates.forward_tflops * rates.causal * 1e12)
    return seconds + 2.5 * forward / (rates.backward_tflops * rates.causal * 1e12)


def _pointwise(rank: RankShare) -> float:
    """``features x tokens x width x times that they move / bandwidth``: 3 times in compiled code, else 8."""
    features = sum(rank.features(unit) * count for unit, count in rank.blocks)
    traffic = features * rank.tokens * rank.count * rank.width
    return traffic * ((3.0 if rank.job.fused else 8.0) * rank.again) / rank.bandwidth


def _issue(rank: RankShare) -> float:
    """The host's time: ``blocks x microbatches x operators x time of an operator``; none for a CUDA graph."""
    if rank.job.graphed:
        return 0.0
    host = rank.machine.host
    each = host.compiled_kernel_us / 5 if rank.job.fused else host.operator_us
    return rank.laps * rank.count * _OPERATORS * rank.again * each * 1e-6


def _host_waits(rank: RankShare) -> float:
    """``blocks with experts x forward passes x waits x (a copy to the host, and the next operator)``."""
    passes = sum(count for unit, count in rank.blocks if unit.routed) * rank.count * (1 + rank.job.recomputed)
    each = rank.machine.memory.kernel_us + rank.machine.host.operator_us
    return passes * rank.job.host_waits * each * 1e-6


def _update(rank: RankShare) -> float:
    """``traffic x parameters / bandwidth``, and ``operations of all matrices of the stage / its ranks / rate``.
    Offloaded, the traffic is at the rate of an optimizer on the host."""
    costs, held = rank.job.optimizer, rank.whole / rank.shards
    seconds = _computed_matrices(rank) + _exchanged_matrices(rank)
    if rank.job.offloads:
        return 16 / 28 * costs.traffic * held / (rank.machine.host.optimizer_gb_s * 1e9) + seconds
    return costs.traffic * held / rank.bandwidth + seconds


def _computed_matrices(rank: RankShare) -> float:
    flops, mesh = rank.job.optimizer.matrix_flops, rank.mesh
    if flops is None:
        return 0.0
    ranks = math.prod(mesh.degrees[dim.name] for dim in mesh.dims if dim.divides != "layers" and not dim.diverges)
    total = sum(
        count * number * flops(rows, columns) for unit, count in rank.blocks for rows, columns, number in unit.weights
    )
    rate = rank.machine.matmul_of(rank.job.optimizer.matrix_type).achievable_tflops * 1e12
    return total / ranks / rate


def _exchanged_matrices(rank: RankShare) -> float:
    """What a rank sends goes to all ranks over which its matrices are divided; no computation hides it."""
    sent = rank.job.optimizer.exchanged_bytes * rank.in_matrices * rank.whole / rank.shards
    if not sent:
        return 0.0
    names = [*rank.mesh.data_dims("shard"), *(dim.name for dim in rank.mesh.dims if dim.divides == "weights")]
    return group_along(rank.machine, rank.mesh, names).seconds(sent, 2)
