"""The config section ``[fault_tolerance]``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from titan_core.api import ALL_KEYS, Ranks, Section
from titan_core.api.config.numbers import LONGEST_SECONDS


class FaultToleranceSection(Section):
    section: ClassVar[str] = "fault_tolerance"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable: bool = False
    """Train as one of several replica groups, which share the global batch and survive each other's faults."""
    lighthouse: str | None = None
    """Address of the lighthouse, at which the groups meet: "http://HOST:PORT". Default: the environment variable
    TORCHFT_LIGHTHOUSE. `titan ft lighthouse` starts one."""
    replica_id: Ranks = Field(default=0, ge=0)
    """Number of this replica group, from 0 to group_size - 1."""
    group_size: Ranks = Field(default=2, gt=0)
    """Number of replica groups when all of them run. The global batch must have a microbatch for each."""
    min_replica_size: Ranks = Field(default=1, gt=0)
    """Least number of groups that take a step. With fewer, those that run wait for the others."""
    process_group: Literal["gloo", "nccl"] = "gloo"
    """Backend that sums gradients over groups. NCCL needs GPUs."""
    process_group_timeout_ms: int = Field(default=10_000, gt=0, le=int(LONGEST_SECONDS) * 1000)
    """Longest time that a group waits for another within a step, and in which a group that joins must have copied the state
    of a peer. A group that was killed is noticed earlier, because its connections close."""
