"""Kinds of blocks, and the small jobs that show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from harness.planned import VIEW, mesh_of
from titan_core.api import MeshPlan, MeshView, ModelLayout, UserError, causal_attention
from titan_core.api.config.resolved import Override
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.estimate.block_classes import block_classes, enough_blocks, repetition, unit_of
from titan_simulate.plan.assembled import Assembled
from titan_simulate.plan.kinds import Kind, Rules, small_job
from titan_simulate.plan.meshes import is_sharded, shares_parameters, smallest_mesh, undivided
from titan_simulate.plan.open_kinds import OpenKind, OpenKinds, slowdown

TP, CP, EP, PP = "tp", "cp", "ep", "pp"


def kind(tp: int = 1, cp: int = 1, ep: int = 1, heads: int = 1, **chosen: object) -> Kind:
    return Kind(((TP, tp), (CP, cp), (EP, ep), ("heads", heads)), tuple(sorted(chosen.items())))


RULES = Rules(
    divided={TP, CP},
    weights={TP},
    exchanged={"heads"},
    experts={EP},
    faster_first={"mode": ("none", "selective", "full")},
)


@dataclass
class Traced:
    """Kinds that take a second for each sequence, and half of it without experts."""

    size: float = 1.0
    slow: tuple[Kind, ...] = ()

    def seconds(self, kind: Kind, batch: int, one_expert: bool = False) -> float:
        return (0.5 if one_expert else 1.0) * (2.0 if kind in self.slow else 1.0) / kind.ranks(RULES.divided)

    def filled(self, kind: Kind, proved: bool = True) -> float:
        return self.size / kind.ranks(RULES.divided)


def open_kinds(*kinds: Kind, traced: Traced | None = None, pipelined: bool = True) -> OpenKinds:
    found = OpenKinds(RULES, traced or Traced(), scale=10.0)
    for one in kinds:
        found.add(one, OpenKind(mesh_of(), 1, pipelined))
    return found


@pytest.mark.parametrize(
    ("child", "parent", "expected"),
    [
        (kind(tp=4), kind(), 10.0),
        (kind(tp=4, cp=2), kind(tp=2), 10.0),
        (kind(tp=6), kind(tp=4), 0.0),
        (kind(), kind(tp=2), 0.0),
        (kind(ep=2), kind(), 5.0),  # experts of more rows are faster
        (kind(ep=4), kind(ep=2), 0.0),
        (kind(tp=2, ep=2), kind(ep=2), 10.0),
        (kind(cp=4, heads=2), kind(), 10.0),
        (kind(cp=4), kind(cp=2, heads=2), 0.0),
        (kind(cp=4, ring="gather"), kind(), 10.0),
        (kind(cp=4, ring="gather"), kind(cp=2, ring="pass"), 0.0),
        (kind(mode="full"), kind(mode="none"), 10.0),  # recomputes
        (kind(tp=2, mode="full"), kind(mode="selective"), 10.0),
        (kind(mode="none"), kind(mode="full"), 0.0),
    ],
)
def test_a_kind_is_no_faster_than_those_that_do_less(child: Kind, parent: Kind, expected: float) -> None:
    """The step of ten sequences for each rank."""
    kinds = open_kinds(child, parent)
    batch = kinds.pop(parent).batch
    kinds.learn(parent, batch)
    assert kinds.bounds() == {child: pytest.approx(expected)}
    related = dict(parent.chosen) == dict(child.chosen) or not parent.chosen
    assert (kinds[child].ancestor == parent) is (expected == 10.0 and related)  # its memory is bounded too
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


def test_data_parallelism_of_experts_has_the_remainder_of_their_view() -> None:
    """Which borrows ranks of tensor parallelism too."""
    view = MeshView("ep", "x.ep", ("dp_shard", "tp"))
    mesh = MeshPlan(STANDARD_DIMS, mesh_of(dp_shard=4, tp=2).degrees, (view,), {"ep": 4})
    assert shares_parameters(mesh, (0, 2, 4, 6))  # see other data
    assert shares_parameters(mesh, (0, 4))  # experts
    assert not shares_parameters(mesh, (0, 1)) and not shares_parameters(mesh, (0, 1, 2, 3))
    activations = MeshPlan(STANDARD_DIMS, mesh.degrees, (replace(view, shards_parameters=False),), {"ep": 3})
    assert not shares_parameters(activations, (0, 3, 6))
    assert shares_parameters(replace(activations, views=(view,)), (0, 3, 6))


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
    ("module", "blocks", "unit"),
    [
        ("layers.3.attention.wq", "layers", "layers.3"),
        ("model.layers.3.self_attn", "model.layers", "model.layers.3"),
        ("model.embed_tokens", "model.layers", "model.embed_tokens"),
        ("lm_head", "model.layers", "lm_head"),
        ("model", "model.layers", ""),
        ("model.layers", "model.layers", ""),
        ("", "layers", ""),
    ],
)
def test_a_unit_is_a_block_or_stands_beside_blocks(module: str, blocks: str, unit: str) -> None:
    assert unit_of(module, blocks) == unit


@pytest.mark.parametrize(
    ("classes", "number"), [([0] * 32, 3), ([0, 1] * 4, 4), ([0] * 3 + [1] * 8, 5), ([0, 0], 2), ([0], 1)], ids=str
)
def test_a_trace_has_an_inner_block_of_each_class(classes: list[int], number: int) -> None:
    assert enough_blocks(classes) == number


@pytest.mark.parametrize(
    ("classes", "first", "blocks"),
    [
        ([0] * 4, 0, 1),
        ([0, 1] * 3, 0, 2),
        ([0] * 3 + [1] * 58, 3, 1),
        ([2, *[0, 0, 1] * 3], 1, 3),
        ([0, 0, 1], 0, 3),
        ([0], 0, 1),
    ],
    ids=str,
)
def test_blocks_repeat_with_their_classes(classes: list[int], first: int, blocks: int) -> None:
    assert repetition(classes) == (first, blocks)


def test_what_is_expected_multiplies_what_was_traced() -> None:
    """Twice the ranks of tensor parallelism take twice the time in all, also where the sequence is divided too."""
    slow = kind(tp=2)
    kinds = open_kinds(
        kind(), slow, kind(cp=2, ring="gather"), *(kind(tp=tp, cp=2, ring="gather") for tp in (2, 4)), kind(ep=2),
        kind(cp=2, heads=2), traced=Traced(slow=(slow,)),
    )  # fmt: skip
    for one in (kind(), slow, kind(cp=2, ring="gather")):
        kinds.learn(one, kinds.pop(one).batch)
    expected = {one: each.bound for one, each in kinds.expected().items()}
    both = kind(tp=2, cp=2, ring="gather")
    assert expected[both] == pytest.approx(20.0, rel=1e-2) and kinds[both].bound == pytest.approx(20.0)
    assert expected[kind(tp=4, cp=2, ring="gather")] == pytest.approx(20.0, rel=1e-2)  # at least as much as with two
    assert expected[kind(ep=2)] == pytest.approx(8.0, rel=1e-2)  # nothing is known of experts
    assert expected[kind(cp=2, heads=2)] == pytest.approx(10.0, rel=1e-2)


def test_a_divided_kind_does_not_pass_for_a_slow_model() -> None:
    """The recipe's blocks, such as TP 8, are traced before undivided ones."""
    slow = kind(tp=8)
    kinds = open_kinds(kind(), slow, kind(cp=2), traced=Traced(slow=(slow,)))
    kinds.learn(slow, kinds.pop(slow).batch)
    assert all(one.bound == 0.0 for one in kinds.expected().values())
    kinds.learn(kind(), kinds.pop(kind()).batch)
    assert kinds.expected()[kind(cp=2)].bound == pytest.approx(10.0, rel=1e-2)


@pytest.mark.parametrize(
    ("filled", "pipelined", "proved", "expected"),
    [
        (0.9, False, True, 1.0),
        (1.5, False, True, math.inf),
        (1.5, True, True, 1.0),
        (6.0, True, True, 3.0),
        (6.0, True, False, 6.0),
    ],
)
def test_activations_that_do_not_fit_slow_a_pipeline_down(
    filled: float, pipelined: bool, proved: bool, expected: float
) -> None:
    assert slowdown(filled, pipelined, proved) == expected
    if proved:
        kinds = open_kinds(kind(), kind(tp=2), traced=Traced(2 * filled), pipelined=pipelined)
        kinds.learn(kind(), kinds.pop(kind()).batch)
        assert kinds[kind(tp=2)].filled == pytest.approx(filled)


def test_the_first_kinds_divide_nothing_and_have_one_slower_choice() -> None:
    slower = [kind(mode=mode) for mode in ("full", "selective", "none")]
    found = open_kinds(*slower, kind(tp=2, mode="none"), kind(ep=2, mode="none")).one_of_each_choice()
    assert found[0] == kind(mode="none") and set(found) == set(slower)


def test_a_mesh_that_divides_nothing_has_all_ranks_in_data_parallelism() -> None:
    mesh = undivided(mesh_of(ep=2, dp_replicate=2, cp=2, tp=4, pp=2), {VIEW.degree_key})
    assert {name: degree for name, degree in mesh.degrees.items() if degree > 1} == {"dp_replicate": 2, "dp_shard": 16}
    assert mesh.view_degrees == {"ep": 2}


def test_a_degree_is_expected_to_cost_no_less_than_a_smaller_one() -> None:
    """Also where no traced kind bounds it: that exchanged keys otherwise."""
    slow, other = kind(cp=2, ring="gather"), kind(cp=4, ring="pass")
    kinds = open_kinds(kind(), slow, other, traced=Traced(slow=(slow,)))
    for one in (kind(), slow):
        kinds.learn(one, kinds.pop(one).batch)
    assert kinds[other].bound == pytest.approx(10.0) and kinds.expected()[other].bound > 10.5


def test_a_kind_is_refused_for_its_own_degrees_only() -> None:
    """Its first mesh may be impossible for another reason."""

    def job_of(overrides: Sequence[Override]) -> AssembledJob:
        values = {one.key: one.text for one in overrides}
        if values[PP] == "8":
            raise UserError.one(f"recipe: {PP} = 8", "there are 4 blocks", "set less")
        if values[TP] == "16":
            raise UserError.one(f"recipe: {TP} = 16", "must divide the 8 heads", "set less")
        raise UserError.one("recipe: training.local_batch_size = 1", "too few", "set more")

    assembled = Assembled(job_of)
    jobs = [({PP: pp, TP: 2}, 1) for pp in (8, 1)]
    assert assembled.accepts_kind(kind(tp=2), jobs, "") and not assembled.refused
    assert not assembled.accepts_kind(kind(tp=16), [({PP: 1, TP: 16}, 1)], "tp=16")
    assert [one.key for one in assembled.refused] == [TP] and assembled.suspects == {(TP, 16)}
