"""The arithmetic that ranks candidates, from hand-made layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titan_core.api.layout import ModelDefinition, ModelLayout
from titan_core.api.layout_rules import Column, Experts, Replicate, Row, causal_attention
from titan_core.api.mesh import STANDARD_DIMS, MeshPlan, MeshView
from titan_core.api.planning import PipelineCosts

arithmetic = pytest.importorskip("titan_simulate.plan.arithmetic")

from titan_simulate.hardware.read import read_machine  # noqa: E402
from titan_simulate.plan.arithmetic import STATE, Arithmetic, Guess, Workload  # noqa: E402
from titan_simulate.plan.candidates import divisors, factorisations  # noqa: E402
from titan_simulate.plan.model_sizes import ModelSizes, sizes_of  # noqa: E402

DIM, HIDDEN, VOCABULARY, BLOCKS, EXPERTS, CHOSEN = 1024, 4096, 32_000, 8, 8, 2
VIEW = MeshView("ep", "x.ep")


def _sizes() -> ModelSizes:
    """A decoder whose blocks have attention with fewer key heads, and experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCABULARY, DIM), "norm.weight": (DIM,), "out.weight": (VOCABULARY, DIM)
    }  # fmt: skip
    modules = ["embed", "norm", "out"]
    for index in range(BLOCKS):
        block = f"blocks.{index}"
        modules += [block, f"{block}.attention", f"{block}.attention.mixer"]
        shapes |= {
            f"{block}.attention.q.weight": (DIM, DIM),
            f"{block}.attention.o.weight": (DIM, DIM),
            f"{block}.norm.weight": (DIM,),
            f"{block}.experts.up": (EXPERTS, DIM, HIDDEN),
            f"{block}.experts.down": (EXPERTS, HIDDEN, DIM),
        }
    layout = ModelLayout(
        num_blocks=BLOCKS, dim=DIM, vocab_size=VOCABULARY, max_seq_len=8192,
        embedding=("embed",), blocks="blocks", head=("norm", "out"),
        rules={
            "*.q.weight": Column(), "*.o.weight": Row(), "*norm.weight": Replicate(), "*.experts.*": Experts(),
        },
        regions=("blocks.*.attention",),
        mixers={"blocks.*.attention.mixer": causal_attention(16, 4)},
    )  # fmt: skip
    active = BLOCKS * (2 * DIM**2 + DIM + CHOSEN * 2 * DIM * HIDDEN) + DIM + VOCABULARY * DIM
    definition = ModelDefinition(
        layout=layout, build=lambda: None, num_params=0, flops_per_token=lambda seq_len: 6.0 * active + 12.0 * seq_len
    )
    return sizes_of(definition, shapes, modules, 8192)


SIZES = _sizes()


def _mesh(ep: int = 1, **degrees: int) -> MeshPlan:
    return MeshPlan(STANDARD_DIMS, {dim.name: degrees.get(dim.name, 1) for dim in STANDARD_DIMS}, (VIEW,), {"ep": ep})


def _job(mesh: MeshPlan, **changes: object) -> Workload:
    job = Workload(mesh, 8192, 1, 4, parameter_bytes=2, matmul_type="bf16", wide_type="bf16")
    return replace(job, **changes)  # type: ignore[arg-type]


def _guess(mesh: MeshPlan, **changes: object) -> Guess:
    return Arithmetic(SIZES, read_machine("h100")).guess(_job(mesh, **changes))


def test_sizes_follow_from_the_rules() -> None:
    block = SIZES.units["blocks.3"]
    assert block.divided == 2 * DIM**2
    assert block.experts == EXPERTS * 2 * DIM * HIDDEN
    assert block.replicated == DIM
    assert block.keys == 2 * DIM * 4 // 16
    assert SIZES.num_experts == (EXPERTS,)
    # The operations per token tell how many experts a token passes through.
    assert block.routed == pytest.approx(CHOSEN * DIM, rel=0.01)


TABLES, BLOCK = 2 * VOCABULARY * DIM + DIM, 2 * DIM**2 + DIM + EXPERTS * 2 * DIM * HIDDEN


@pytest.mark.parametrize(
    ("mesh", "bytes_"),
    [
        (_mesh(), 16 * (TABLES + BLOCKS * BLOCK)),
        (_mesh(tp=2), 16 * (VOCABULARY * DIM + DIM + BLOCKS * (DIM**2 + DIM + EXPERTS * 2 * DIM * HIDDEN))),
        (_mesh(dp_shard=8), 2 * (TABLES + BLOCKS * BLOCK)),
        # The ranks of a view hold an expert once, and data parallelism shards it over what remains of them.
        (_mesh(dp_shard=8, ep=4), 2 * (TABLES + BLOCKS * BLOCK)),
        (_mesh(dp_replicate=8), 16 * (TABLES + BLOCKS * BLOCK)),
    ],
    ids=["one", "weights", "shard", "view", "replicate"],
)  # fmt: skip
def test_state_is_divided_as_the_mesh_divides_it(mesh: MeshPlan, bytes_: int) -> None:
    assert _guess(mesh).memory[STATE] == pytest.approx(bytes_)


def test_recomputation_trades_time_for_memory() -> None:
    keeps, recomputes = _guess(_mesh(dp_shard=8)), _guess(_mesh(dp_shard=8), kept=0.0, recomputed=1.0)
    assert recomputes.memory["activations"] < keeps.memory["activations"] / 3
    assert recomputes.seconds["recomputation"] == pytest.approx(keeps.seconds["compute"] / 3, rel=0.2)


def test_a_group_within_a_node_communicates_faster() -> None:
    near, far = _guess(_mesh(dp_shard=2, tp=8)), _guess(_mesh(tp=16))
    assert 0 < near.seconds["tp"] < far.seconds["tp"]
    # The same dimension in another place: its neighbours are in other nodes.
    inner, outer = _guess(_mesh(cp=2, dp_shard=8)), _guess(_mesh(cp=2, tp=8))
    assert inner.seconds["cp"] < outer.seconds["cp"] * 8


def test_experts_exchange_positions_over_their_view() -> None:
    assert "ep" not in _guess(_mesh(dp_shard=8)).seconds
    near, far = _guess(_mesh(dp_shard=32, ep=8)), _guess(_mesh(dp_shard=32, ep=16))
    assert 0 < near.seconds["ep"] < far.seconds["ep"]


def test_a_pipeline_idles_and_its_worst_rank_counts() -> None:
    names = list(SIZES.units)
    stages = (tuple(names[:3]), tuple(names[3:]))  # two blocks, and six with the head
    costs = PipelineCosts(
        stages=stages, rank_of=(0, 1), microbatch_size=1, microbatches=4, alive=(2.0, 1.0), idle=0.25
    )  # fmt: skip
    uneven = _guess(_mesh(pp=2), pipeline=costs)
    busy = sum(seconds for kind, seconds in uneven.seconds.items() if kind not in ("idle", "update"))
    assert uneven.seconds["idle"] == pytest.approx(busy / 4)
    even = replace(costs, stages=(tuple(names[:5]), tuple(names[5:])))
    assert _guess(_mesh(pp=2), pipeline=even).step_seconds < uneven.step_seconds
    more_alive = replace(costs, alive=(2.0, 4.0))
    assert _guess(_mesh(pp=2), pipeline=more_alive).memory["activations"] > uneven.memory["activations"]


def test_a_type_that_computes_faster_takes_less_time() -> None:
    mesh = _mesh(dp_shard=8)
    assert _guess(mesh, matmul_type="fp8").step_seconds < _guess(mesh).step_seconds


@pytest.mark.parametrize("number", [1, 12, 512])
def test_factorisations_are_complete(number: int) -> None:
    found = list(factorisations(number, 3))
    expected = [(a, b, number // a // b) for a in divisors(number) for b in divisors(number // a)]
    assert found == expected
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
