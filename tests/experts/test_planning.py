"""What planning knows of expert parallelism."""

from __future__ import annotations

import pytest

from titan_core.api import Router
from titan_experts.config import DISPATCH_KEY, ExpertParallelKeys, most_share


@pytest.mark.parametrize(
    ("experts", "per_token", "ranks", "capacity", "share"),
    [(128, 8, 8, None, 1.0), (128, 8, 64, None, 2 / 8), (128, 8, 8, 1.25, 1.25 / 8), (8, 2, 8, None, 1 / 2)],
    ids=["all to one rank", "two experts of a rank", "a capacity", "one expert of a rank"],
)
def test_a_rank_sends_to_another_at_most(
    experts: int, per_token: int, ranks: int, capacity: float | None, share: float
) -> None:
    keys = ExpertParallelKeys(
        expert_parallel_degree=ranks, expert_parallel_dispatch="device", expert_parallel_capacity=capacity
    )
    assert most_share(Router(experts=experts, per_token=per_token), keys) == pytest.approx(share)
    assert DISPATCH_KEY.partition(".")[2] in ExpertParallelKeys.model_fields
