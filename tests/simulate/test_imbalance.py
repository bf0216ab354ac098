"""The trace of the rank whose experts have most rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from titan_core.api import Experts

pytest.importorskip("titan_simulate")

from titan_simulate.estimate.imbalance import busiest
from titan_simulate.estimate.work import Data, Kind, Work

EXPERTS = "blocks.3.experts"


def _work(name: str, module: str = EXPERTS) -> Work:
    return Work(Kind.POINTWISE, name, "forward", module, "main", (), (Data(1, 100),), (Data(2, 100),), flops=100, bytes=100)


TRACE = [
    _work("aten::_grouped_mm"), _work("aten::silu"), _work("_c10d_functional::all_to_all_single"),
    _work("c10d::_allgather_base_"), _work("fsdp::chunk_cat"), _work("aten::mm", "blocks.3.attention.wq"),
]  # fmt: skip


def _job(degree: int) -> Any:
    view = SimpleNamespace(name="ep", shards_parameters=True)
    layout = SimpleNamespace(rules={"blocks.*.experts.*": Experts()})
    mesh = SimpleNamespace(views=(view,), view_degrees={"ep": degree})
    return cast(Any, SimpleNamespace(mesh=mesh, model=SimpleNamespace(layout=layout)))


@pytest.mark.parametrize(
    ("degree", "fixed", "flops"),
    [(4, False, [150, 150, 150, 100, 100, 100]), (4, True, [150, 100, 100, 100, 100, 100]), (1, False, [100] * 6)],
    ids=["as many rows as there are", "buffers of a fixed size", "not divided"],
)
def test_what_grows_with_the_rows_of_experts_takes_longer(degree: int, fixed: bool, flops: list[int]) -> None:
    found = busiest(TRACE, _job(degree), 1.5, fixed)
    assert [work.flops for work in found] == [work.bytes for work in found] == flops
    assert [work.traffic for work in found] == [2 * one for one in flops]
    assert busiest(TRACE, _job(degree), 1.0, fixed) == TRACE
