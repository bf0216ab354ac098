"""The config keys of titan-expert-parallel."""

from typing import ClassVar

from pydantic import Field

from titan_core.api import ALL_KEYS, Ranks, Section


class ExpertParallelKeys(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    expert_parallel_degree: Ranks = Field(default=1, gt=0)
    """Number of ranks that the experts of each block are divided over. These are ranks of data and context parallelism: the
    degree must divide data_parallel_shard_degree x context_parallel_degree."""
