"""Division of the global batch over ranks, microbatches and logical shards of the data. Arithmetic only."""

from __future__ import annotations

from titan_core.api.batch_plan import BatchPlan
from titan_core.api.config import Config
from titan_core.api.errors import UserError
from titan_core.api.sections import DataSection, TrainingSection

MOST_TOKENS_AHEAD = 2**31
"""Most tokens that one rank may read ahead: 16 GiB of ids."""


def plan_batch(config: Config, ranks: int) -> BatchPlan:
    """Divide the global batch over ``ranks`` groups of ranks that see different data.

    Raises:
        UserError: a size does not divide another, or ``data.prefetch`` exceeds the limit.
    """
    training = config.section(TrainingSection)
    local = training.local_batch_size
    if training.global_batch_size == 0:
        raise UserError(config.problem("training.global_batch_size", "must be at least 1, or -1"))
    size = training.global_batch_size if training.global_batch_size > 0 else local * ranks
    if size % (local * ranks):
        lower = size // (local * ranks) * local * ranks
        nearest = [candidate for candidate in (lower, lower + local * ranks) if candidate > 0]
        raise UserError(
            config.problem(
                "training.global_batch_size",
                f"must be a multiple of local_batch_size {local} x data-parallel degree {ranks} = {local * ranks}",
                f"set it to {' or '.join(map(str, nearest))}, or change local_batch_size",
            )
        )
    shards = config.section(DataSection).logical_shards or size
    if shards % ranks or size % shards:
        raise UserError(
            config.problem(
                "data.logical_shards",
                f"must be a multiple of the data-parallel degree {ranks} and divide the global batch of {size} sequences",
                f"set it to 0 for the default of {size}",
            )
        )
    ahead = size // ranks * training.seq_len * config.section(DataSection).prefetch
    if ahead > MOST_TOKENS_AHEAD:
        raise UserError(
            config.problem(
                "data.prefetch",
                f"each rank would hold {ahead:.3g} tokens in memory ({size // ranks} sequences per step); the limit is "
                f"{MOST_TOKENS_AHEAD:.3g}",
                "lower it, training.global_batch_size or training.seq_len",
            )
        )
    return BatchPlan(size, local, size // (local * ranks), ranks, shards, training.seq_len)
