"""The terms of a rank's memory, in bytes. The docstring of each is its formula. Free of torch."""

from __future__ import annotations

from titan_simulate.plan.rank_share import RankShare
from titan_simulate.plan.workload import GIB, STATE, folded, views

_CHUNK = 2**30
"""Bytes of the fp32 logits of a chunk of the loss."""
_FRAGMENTS = 0.12
"""Reserved memory that is not in use, relative to that in use: a guess that only ranks candidates."""


def memory_of(rank: RankShare) -> dict[str, float]:
    """Return bytes by kind."""
    found = {
        STATE: _state(rank),
        "gathered": _gathered(rank),
        "activations": _activations(rank),
        "logits and loss": _logits(rank),
    }
    # What the update needs beside state, where activations were.
    found["update"] = max(0.0, rank.job.optimizer.workspace_bytes - found["activations"] - found["logits and loss"])
    fragments = _FRAGMENTS if rank.machine.allocator.caching else 0.0
    return {**found, "allocator": sum(found.values()) * fragments, "context": rank.machine.context_gib * GIB}


def _state(rank: RankShare) -> float:
    """``held x (4 weights + 4 gradients + optimizer)``, with the parameters held after all divisions, without the
    optimizer for what another stage updates. Experts are divided by views first, and by data parallelism, with the ranks
    that views borrow from other dimensions, as far as it has more ranks. Offloaded, it is on the host."""
    of_experts = max(1, rank.shards * folded(rank.mesh) // views(rank.mesh))
    held = (rank.whole - rank.experts) / rank.shards + rank.experts / of_experts
    copied = rank.held.copied / rank.weights / rank.shards
    if rank.job.offloads:
        return 0.0
    costs = rank.job.optimizer
    of_matrices = costs.state_bytes if costs.matrix_state_bytes is None else costs.matrix_state_bytes
    state = costs.state_bytes + rank.in_matrices * (of_matrices - costs.state_bytes)
    return held * (8 + state) - copied * costs.state_bytes


def _gathered(rank: RankShare) -> float:
    """Weights that data parallelism gathers, and gradients in the type of their reduction: of two units (one is gathered
    while another computes) and of one, or of the whole rank if they stay gathered. What computes in fp32 stays."""
    job, whole, largest = rank.job, rank.whole, rank.largest
    if rank.shards == 1 and job.parameter_bytes >= 4:
        return 0.0
    parameters = (whole if job.parameters_stay else min(whole, 2 * largest)) * job.parameter_bytes
    exact = rank.exact * max(0, 4 - job.parameter_bytes)
    return parameters + exact + (whole if job.gradients_stay else largest) * job.reduce_bytes


def _activations(rank: RankShare) -> float:
    """``tokens x width x (alive x (inputs of blocks + kept x features of blocks) + the rest of one block)``, where
    ``alive`` counts microbatches in flight; and the keys and values of other positions that a block attends to."""
    job, weights = rank.job, rank.weights
    features = [(rank.features(unit), count) for unit, count in rank.blocks]
    inputs = rank.laps * rank.sizes.dim / weights
    kept = rank.held.alive * (inputs + job.kept * sum(count * each for each, count in features))
    largest = max((each for each, _ in features), default=0.0)
    working = largest * (1.0 - job.kept) * (0.75 if job.fused else 1.0)
    keys = max((rank.keys_of(unit) for unit, _ in rank.blocks), default=0.0) / weights
    held = 2 if job.passes_keys else rank.ring  # of another rank and the next one, or of all
    exchanged = 0.0 if rank.ring == 1 else keys * (rank.width + 4) * held  # gradients are summed in fp32
    return rank.tokens * (rank.width * (kept + working) + exchanged)


def _logits(rank: RankShare) -> float:
    """``positions of a chunk x vocabulary / weights x (fp32 logits, logits and their gradient)``, on the last stage."""
    if not rank.held.head:
        return 0.0
    vocabulary = rank.sizes.vocab_size / rank.weights
    chunk = min(rank.tokens, max(1.0, _CHUNK / 4 / vocabulary))
    return chunk * vocabulary * (4 + 2 * rank.width)
