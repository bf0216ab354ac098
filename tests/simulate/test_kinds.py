"""Kinds of blocks, and the small jobs that show them."""

from __future__ import annotations

import pytest

from harness.planned import VIEW, mesh_of
from titan_core.api import MeshPlan, ModelLayout, causal_attention
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_simulate.estimate.block_classes import block_classes, enough_blocks, period
from titan_simulate.plan.kinds import Kind, is_sharded, small_job, smallest_mesh

TP, CP, EP = "tp", "cp", "ep"


def kind(tp: int = 1, cp: int = 1, ep: int = 1, heads: int = 1, **chosen: object) -> Kind:
    return Kind(((TP, tp), (CP, cp), (EP, ep), ("heads", heads)), tuple(sorted(chosen.items())))


@pytest.mark.parametrize(
    ("child", "parent", "expected"),
    [
        (kind(tp=4), kind(), True),
        (kind(tp=4, cp=2), kind(tp=2), True),
        (kind(tp=6), kind(tp=4), False),
        (kind(), kind(tp=2), False),
        (kind(ep=2), kind(), False),  # experts of more rows are faster
        (kind(tp=2, ep=2), kind(ep=2), True),
        (kind(cp=4, heads=2), kind(), True),
        (kind(cp=4), kind(cp=2, heads=2), False),
        (kind(cp=4, ring="gather"), kind(), True),
        (kind(cp=4, ring="gather"), kind(cp=2, ring="pass"), False),
        (kind(mode="full"), kind(mode="none"), False),
    ],
)
def test_a_kind_descends_from_those_that_fewer_ranks_divide(child: Kind, parent: Kind, expected: bool) -> None:
    assert child.descends_from(parent, divided={TP, CP}, ignored={"heads"}) is expected
    assert kind(tp=4, cp=2, ep=8).ranks({TP, CP}) == 8


def test_the_smallest_mesh_has_no_stages_and_shards_as_few_ranks_as_views_need() -> None:
    def degrees(mesh: MeshPlan) -> dict[str, int]:
        return {name: degree for name, degree in smallest_mesh(mesh).degrees.items() if degree > 1}

    assert degrees(mesh_of(pp=8, dp_replicate=2, dp_shard=16, tp=4)) == {"dp_shard": 2, "tp": 4}
    assert degrees(mesh_of(ep=8, dp_shard=64, cp=2)) == {"dp_shard": 8, "cp": 2}
    assert degrees(mesh_of(dp_replicate=16, tp=2)) == {"dp_replicate": 2, "tp": 2}
    assert degrees(mesh_of(dp_replicate=16, cp=2)) == {"cp": 2}  # which shards parameters
    assert degrees(mesh_of(pp=4)) == {}
    assert is_sharded(mesh_of(cp=2)) and not is_sharded(mesh_of(dp_replicate=2))


def test_a_small_job_has_a_microbatch_and_the_choices_of_its_kind() -> None:
    mesh = MeshPlan(STANDARD_DIMS, {**mesh_of(dp_shard=4, tp=2).degrees}, (VIEW,), {"ep": 2})
    ranks, overrides = small_job(mesh, kind(mode="full", ring=None), 2)
    values = {one.key: one.text for one in overrides}
    assert ranks == 8
    assert (values["training.local_batch_size"], values["training.global_batch_size"]) == ("2", "8")
    assert (values["mode"], values["ring"], values["x.ep"]) == ("full", "none", "2")


def test_blocks_of_a_class_have_equal_costs_and_attention() -> None:
    layout = ModelLayout(
        num_blocks=6, dim=8, vocab_size=16, max_seq_len=64, embedding=("embed",), blocks="blocks", head=("out",), rules={},
        mixers={"blocks.[024].mixer": causal_attention(2, 2, window=4), "blocks.[135].mixer": causal_attention(2, 2)},
        block_costs=(0.5, 0.5, 1.0, 1.0, 1.0, 1.0),
    )  # fmt: skip
    assert list(block_classes(layout).values()) == [0, 1, 2, 3, 2, 3]
    assert list(block_classes(layout, frozen=["blocks.5.w"]).values()) == [0, 1, 2, 3, 2, 4]


@pytest.mark.parametrize(
    ("classes", "number"), [([0] * 32, 3), ([0, 1] * 4, 4), ([0] * 3 + [1] * 8, 5), ([0, 0], 2), ([0], 1)], ids=str
)
def test_a_trace_has_an_inner_block_of_each_class(classes: list[int], number: int) -> None:
    assert enough_blocks(classes) == number


@pytest.mark.parametrize(("classes", "blocks"), [([0] * 4, 1), ([0, 1] * 3, 2), ([0, 0, 1], 3), ([0], 1)], ids=str)
def test_blocks_repeat_with_their_classes(classes: list[int], blocks: int) -> None:
    assert period(classes) == blocks
