"""Divides a global batch over ranks and microbatches. Arithmetic only; free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPlan:
    """Sizes in sequences. ``global_size = ranks * microbatches * local_size``."""

    global_size: int
    local_size: int
    microbatches: int
    """Forward and backward passes per optimizer step (gradient accumulation)."""
    ranks: int
    """Ranks, or groups of ranks, that see different sequences."""
    logical_shards: int
    """Number of streams of the dataset; each contributes ``global_size / logical_shards`` sequences to every step."""
    seq_len: int

    @property
    def tokens_per_step(self) -> int:
        """Number of input tokens per optimizer step, over all ranks."""
        return self.global_size * self.seq_len
