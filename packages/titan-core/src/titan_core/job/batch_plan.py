"""Division of the global batch over ranks, microbatches and logical shards of the data. Arithmetic only."""

from __future__ import annotations

from titan_core.api import BatchPlan, Config, UserError
from titan_core.api.config.sections import DataSection, TrainingSection

LOCAL_BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
SHARDS = "data.logical_shards"
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
        raise UserError(config.problem(GLOBAL_BATCH, "must be at least 1, or -1"))
    size = training.global_batch_size if training.global_batch_size > 0 else local * ranks
    shards = config.section(DataSection).logical_shards or size
    if size % (local * ranks):
        why = f"must be a multiple of local_batch_size {local} x data-parallel degree {ranks} = {local * ranks}"
        raise UserError(config.problem(GLOBAL_BATCH, why, _whole_batches(config, size, ranks)))
    if shards % ranks or size % shards:
        raise UserError(
            config.problem(
                SHARDS,
                f"must be a multiple of the data-parallel degree {ranks} and divide the global batch of {size} sequences",
                f"set {SHARDS} = 0, for the default of {size}",
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


def _whole_batches(config: Config, size: int, ranks: int) -> str:
    """Return the fix of a global batch of ``size`` that does not divide: the nearest ones that do, or local ones."""
    local, shards = config.section(TrainingSection).local_batch_size, config.section(DataSection).logical_shards
    lower = size // (local * ranks) * local * ranks
    sizes = [one for one in (lower, lower + local * ranks) if one > 0 and (shards == 0 or one % shards == 0)]
    locals_ = [one for one in range(local - 1, 0, -1) if size % (one * ranks) == 0][:1]
    fixes = [
        f"set {key} = {' or '.join(map(str, values))}"
        for key, values in ((GLOBAL_BATCH, sizes), (LOCAL_BATCH, locals_))
        if values
    ]
    return ", or ".join(fixes) or f"change {LOCAL_BATCH} or {SHARDS}, too"
