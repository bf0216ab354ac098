"""Requirements for a job with divided experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from titan_core.api import Experts, MeshPlan, MeshView, Problem, Shard
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_experts.config import DEGREE, ExpertParallelKeys, check


@pytest.mark.parametrize(
    ("rule", "borrows", "tp", "refused"),
    [
        (Experts(), ("dp_shard", "cp", "tp"), 2, False),
        (Experts(within=Shard(1)), ("dp_shard", "cp", "tp"), 2, True),
        (Experts(within=Shard(1)), ("dp_shard", "cp", "tp"), 1, False),
        (Experts(within=Shard(1)), ("dp_shard", "cp"), 2, False),  # without sequence parallelism
    ],
)
def test_tensor_parallelism_does_not_divide_experts_among_the_same_ranks(
    rule: Experts, borrows: tuple[str, ...], tp: int, refused: bool
) -> None:
    view = MeshView("ep", DEGREE, borrows, folds_weights=True)
    degrees = {dim.name: {"tp": tp, "dp_shard": 2}.get(dim.name, 1) for dim in STANDARD_DIMS}
    context: Any = SimpleNamespace(
        section=ExpertParallelKeys(expert_parallel_degree=2),
        config=SimpleNamespace(problem=Problem),
        job=SimpleNamespace(
            mesh=MeshPlan(STANDARD_DIMS, degrees, (view,), {"ep": 2}),
            model=SimpleNamespace(layout=SimpleNamespace(rules={"blocks.*.experts.*": rule})),
        ),
    )
    problems = list(check(context))
    assert len(problems) == refused
    if refused:
        why = "its ranks include those of tp, among which the rule for 'blocks.*.experts.*' divides each expert"
        assert (problems[0].where, problems[0].why) == (DEGREE, why)
