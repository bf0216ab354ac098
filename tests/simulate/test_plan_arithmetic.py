"""The arithmetic that ranks candidates, from hand-made layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from titan_core.api import (
    Column,
    Experts,
    MeshPlan,
    MeshView,
    ModelDefinition,
    ModelLayout,
    OptimizerCosts,
    PipelineCosts,
    Replicate,
    Router,
    Row,
    causal_attention,
)
from titan_core.api.parallel.mesh import STANDARD_DIMS

pytest.importorskip("titan_simulate")

from titan_simulate.hardware.machine import Allocator, Attention, Host, Link, Links, Machine, Matmul, MemoryRates
from titan_simulate.hardware.read import read_machine
from titan_simulate.plan.arithmetic import Arithmetic
from titan_simulate.plan.candidates import divisors, factorisations
from titan_simulate.plan.groups import group_along
from titan_simulate.plan.model_sizes import Matrix, ModelSizes, Unit, keys_of, sizes_of
from titan_simulate.plan.rank_collectives import exchange_seconds
from titan_simulate.plan.search import _reason, _speed, corrected
from titan_simulate.plan.unit_kinds import UnitKinds
from titan_simulate.plan.workload import STATE, Guess, Workload

DIM, HIDDEN, VOCABULARY, BLOCKS, EXPERTS, CHOSEN = 1024, 4096, 32_000, 8, 8, 2
VIEW = MeshView("ep", "x.ep", ("dp_shard", "cp"))


def _sizes(tied: bool = False, exact: tuple[str, ...] = (), routers: Mapping[str, Router] | None = None) -> ModelSizes:
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
        tied={"out.weight": "embed.weight"} if tied else {}, exact=exact, routers=routers or {},
    )  # fmt: skip
    if tied:
        del shapes["out.weight"]
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
    assert [keys_of(mixer, DIM) for mixer in block.mixers] == [2 * DIM * 4 // 16]
    assert SIZES.num_experts == (EXPERTS,)
    # The operations per token tell how many experts a token passes through.
    assert block.routed == pytest.approx(CHOSEN * DIM, rel=0.01)


def test_a_router_tells_how_many_experts_a_token_passes_through() -> None:
    attention = {"blocks.*.attention": Router(experts=EXPERTS, per_token=3), "embed": Router(experts=EXPERTS, per_token=1)}
    block = _sizes(routers=attention).units["blocks.3"]
    assert block.routed == 3 * DIM
    assert [matrix.copies for matrix in block.matrices if matrix.copies != 1] == [3, 3]


def test_what_computes_in_fp32_is_gathered_in_fp32() -> None:
    machine, none = read_machine("h100"), (0, 0, 0)
    for pattern, on_one, on_tp, on_ep in (
        ("none", *none),
        ("*.q.weight", DIM**2, DIM**2 // 2, DIM**2),
        ("blocks.*.norm.weight", DIM, DIM, DIM),
        ("*.experts.up", EXPERTS * DIM * HIDDEN, EXPERTS * DIM * HIDDEN, 2 * DIM * HIDDEN),
    ):
        exact = Arithmetic(_sizes(exact=(pattern,)), machine)
        for mesh, more in ((_mesh(dp_shard=8), on_one), (_mesh(dp_shard=4, tp=2), on_tp), (_mesh(dp_shard=8, ep=4), on_ep)):
            found = exact.guess(_job(mesh)).memory["gathered"] - _guess(mesh).memory["gathered"]
            assert found == pytest.approx(2 * BLOCKS * more, abs=1)


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


# The machine of round figures below has 4 ranks a node: 100 GB/s within it, and 10 GB/s to others.
def _of_experts(mesh: MeshPlan, imbalance: float = 1.0, **changes: object) -> Guess:
    return Arithmetic(SIZES, TEN, imbalance).guess(_job(mesh, **changes))


@pytest.mark.parametrize(("ep", "share"), [(2, 1 / 2 / 100e9), (4, 3 / 4 / 100e9), (8, 4 / 8 / 10e9)])
def test_rows_are_sent_to_their_experts_and_back_over_the_links_between(ep: int, share: float) -> None:
    """Four times in a step, of 4 microbatches; of what leaves a rank, each card sends what leaves the node."""
    routed = SIZES.units["blocks.3"].routed * BLOCKS * 8192 * 2
    assert _of_experts(_mesh(dp_shard=8, ep=ep)).seconds["ep"] == pytest.approx(routed * 4 * 4 * share)
    recomputed = _of_experts(_mesh(dp_shard=8, ep=ep), kept=0.0, recomputed=1.0).seconds["ep"]
    assert recomputed == pytest.approx(routed * 6 * 4 * share)


def test_the_busiest_rank_computes_and_receives_more_rows_if_ranks_divide_the_experts() -> None:
    even, busy = (_of_experts(_mesh(dp_shard=8, ep=4), imbalance) for imbalance in (1.0, 1.5))
    assert busy.seconds["ep"] == pytest.approx(1.5 * even.seconds["ep"])
    unit = SIZES.units["blocks.3"]
    rows = sum(matrix.copies * matrix.inner * matrix.outer for matrix in unit.matrices if matrix.experts)
    more = 0.5 * 6 * rows * 8192 * BLOCKS * 4 / 10e12
    assert busy.seconds["compute"] - even.seconds["compute"] == pytest.approx(more, rel=0.01)
    fixed = [_of_experts(_mesh(dp_shard=8, ep=4), one, exchanged_rows=4.0).seconds["ep"] for one in (1.0, 1.5)]
    assert fixed == pytest.approx([4 * even.seconds["ep"]] * 2)
    whole = [_of_experts(_mesh(dp_shard=8), imbalance) for imbalance in (1.0, 1.5)]
    assert whole[0] == whole[1]


def test_buffers_of_a_fixed_size_hold_empty_places() -> None:
    even, padded = (_of_experts(_mesh(dp_shard=8, ep=4), exchanged_rows=rows) for rows in (None, 4.0))
    features = 2 * (DIM + HIDDEN) * SIZES.units["blocks.3"].routed / DIM
    assert padded.memory["activations"] - even.memory["activations"] == pytest.approx(
        3 * features * 8192 * 2 * BLOCKS, rel=1e-6
    )


def test_the_host_waits_in_each_forward_pass_of_a_block_with_experts() -> None:
    each = TEN.memory.kernel_us * 1e-6
    for again in (0.0, 1.0):
        with_wait, none = (_of_experts(_mesh(dp_shard=8), recomputed=again, host_waits=waits) for waits in (1.0, 0.0))
        passes = BLOCKS * 4 * (1 + again)
        assert with_wait.seconds["host"] - none.seconds["host"] == pytest.approx(passes * each)
    assert _by_hand(_mesh(), host_waits=1.0).seconds["host"] == 0.0


def test_experts_of_few_rows_compute_empty_tiles_and_are_read_nevertheless() -> None:
    """So dividing them pays, where few positions are on a rank."""

    def compute(tokens: int, ep: int) -> float:
        return _of_experts(_mesh(dp_shard=8, ep=ep), seq_len=tokens).seconds["compute"]

    assert compute(8192, 1) == pytest.approx(compute(8192, 8), rel=0.05)
    assert compute(64, 1) > 2 * compute(64, 8)
    # 16 rows of each expert, whose weights take longer to read twice and to write than to multiply.
    kinds = UnitKinds(SIZES, read_machine("h100"))
    (up,) = (one for one in SIZES.units["blocks.3"].matrices if one.experts and one.inner == HIDDEN)
    rates, memory = kinds.machine.matmul_of("bf16"), kinds.machine.memory
    moving = 3 * EXPERTS * DIM * HIDDEN * 2 / (memory.bandwidth_gb_s * 1e9 * memory.efficiency)
    assert kinds._expert_seconds(up, rates, 1.0, 1, 2) == pytest.approx(moving)


def test_exchanging_heads_costs_less_the_more_ranks_there_are_and_rings_do_not() -> None:

    def guess(ranks: int, heads: int = 1) -> Guess:
        return _guess(_mesh(cp=ranks, dp_shard=2), seq_len=2**17, exchanges_heads=heads)

    rings = [guess(ranks).seconds["cp"] for ranks in (2, 4, 8)]
    heads = [guess(ranks, ranks).seconds["cp"] for ranks in (2, 4, 8)]
    assert rings[0] < rings[1] < rings[2] and heads[0] > heads[1] > heads[2]
    assert heads[2] < guess(8, 4).seconds["cp"] < rings[2]
    # Of each position a rank sends 7/8 of queries and results, and of its 4 key heads, which are 8 then.
    sent = 2**17 / 8 * 7 / 8 * DIM * (2 + 2 * 8 / 16) * 2 * (2 * BLOCKS * 4)
    assert heads[2] == pytest.approx(sent / (read_machine("h100").links.node.bandwidth_gb_s * 1e9), rel=0.2)
    # No keys of other ranks are held.
    assert guess(8, 8).memory["activations"] < guess(8, 4).memory["activations"] < guess(8).memory["activations"]


def test_a_ring_exchanges_what_windows_cover() -> None:
    def ring(window: int | None) -> Guess:
        mixers = [causal_attention(16, 4, window=window)]
        units = {name: replace(unit, mixers=mixers if unit.mixers else []) for name, unit in SIZES.units.items()}
        job = _job(_mesh(cp=4, dp_shard=2), seq_len=2**17)
        return Arithmetic(replace(SIZES, units=units), read_machine("h100")).guess(job)

    whole, half, few = ring(None), ring(2**14), ring(2**10)
    assert few.seconds["cp"] < half.seconds["cp"] < whole.seconds["cp"]
    assert few.memory["activations"] < half.memory["activations"] < whole.memory["activations"]
    assert ring(2**17).seconds == whole.seconds


def test_experts_on_ranks_that_divide_weights_are_held_once() -> None:
    """State of 16 bytes a parameter: with 8 ranks of tensor parallelism each holds 1/8 of the experts, not all of them."""
    degrees = {dim.name: {"tp": 8}.get(dim.name, 1) for dim in STANDARD_DIMS}
    view = MeshView("ep", "x.ep", ("dp_shard", "cp", "tp"), folds_weights=True)
    experts = BLOCKS * 2 * EXPERTS * DIM * HIDDEN
    for degree in (2, 8):
        folds = _guess(MeshPlan(STANDARD_DIMS, degrees, (view,), {"ep": degree}))
        assert _guess(_mesh(tp=8)).memory[STATE] - folds.memory[STATE] == pytest.approx(16 * experts * 7 / 8)


def test_views_without_parameters_divide_none() -> None:
    view = MeshView("heads", "x.heads", ("cp",), shards_parameters=False)
    degrees = {dim.name: {"cp": 4}.get(dim.name, 1) for dim in STANDARD_DIMS}
    mesh = MeshPlan(STANDARD_DIMS, degrees, (view,), {"heads": 4})
    assert _guess(mesh).memory == _guess(_mesh(cp=4)).memory and _guess(mesh).seconds == _guess(_mesh(cp=4)).seconds


@pytest.mark.parametrize(
    ("mesh", "divisor"), [(_mesh(pp=2), 1), (_mesh(pp=2, tp=2, dp_shard=4), 8)], ids=["pp", "pp, tp, shard"]
)
def test_a_weight_that_two_stages_share_is_in_both_and_its_optimizer_state_in_one(mesh: MeshPlan, divisor: int) -> None:
    sizes = _sizes(tied=True)
    names = list(sizes.units)
    costs = PipelineCosts(
        stages=(tuple(names[:2]), tuple(names[2:])), rank_of=(0, 1), microbatch_size=1, microbatches=4,
        alive=(2.0, 1.0), idle=0.25,
    )  # fmt: skip
    tied, alone = (
        Arithmetic(each, read_machine("h100")).guess(_job(mesh, pipeline=costs)).memory[STATE]
        for each in (sizes, replace(sizes, ties=()))
    )
    assert tied - alone == pytest.approx(8 * VOCABULARY * DIM / divisor)
    one = Arithmetic(sizes, read_machine("h100"))
    assert one.guess(_job(_mesh())).memory[STATE] == pytest.approx(16 * (TABLES - VOCABULARY * DIM + BLOCKS * BLOCK))


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


# A machine of round figures, and a model of one kind of block with one matrix, so that each term is computed by hand.
TEN = read_machine("h100").model_copy(
    update={
        "memory_gib": 100.0,
        "context_gib": 0.0,
        "ranks_per_node": 4,
        "matmul": {
            kind: Matmul(peak_tflops=2.0 * rate, achievable_tflops=rate, half_depth=0.0)
            for kind, rate in (("bf16", 10.0), ("fp32", 1.0))
        },
        "attention": Attention(forward_tflops=4.0, backward_tflops=5.0, causal=0.5),
        "memory": MemoryRates(bandwidth_gb_s=1000.0, efficiency=0.5),
        "host": Host(operator_us=0.0, compiled_kernel_us=0.0, optimizer_gb_s=20.0),
        "links": Links(
            start_us=0.0,
            node=Link(bandwidth_gb_s=100.0, latency_us=0.0),
            network=Link(bandwidth_gb_s=10.0, latency_us=0.0),
        ),
        "allocator": Allocator(caching=False),
    }
)
WIDTH, UP, WORDS, LAYERS, LENGTH = 1000, 4000, 50_000, 4, 1000
KEYS = 500  # 2 x WIDTH, a fourth of the heads
TABLE = WORDS * WIDTH


def _plain() -> ModelSizes:
    unit = Unit(
        divided=WIDTH * UP, matrices=[Matrix(WIDTH, UP, Column())], weights=[(UP, WIDTH, 1)],
        regions=1, shared=WIDTH, split=UP + 4 * WIDTH,
        mixers=[causal_attention(4, 1)],
    )  # fmt: skip
    blocks = {f"blocks.{index}": replace(unit) for index in range(LAYERS)}
    outer = {
        name: Unit(divided=TABLE, matrices=[Matrix(WIDTH, WORDS, None)] if name == "out" else [])
        for name in ("embed", "out")
    }
    units = {"embed": outer["embed"], **blocks, "out": outer["out"]}
    flops = 6.0 * (LAYERS * WIDTH * UP + TABLE)
    return ModelSizes(units, WIDTH, WORDS, tuple(blocks), (), flops, mixer_flops=6e6)


PLAIN = _plain()


def _with_links(node: float, network: float, ranks_per_node: int = 4) -> Machine:
    """Return the machine with other bandwidths, in GB/s."""
    node_link, network_link = (Link(bandwidth_gb_s=one, latency_us=0.0) for one in (node, network))
    links = Links(start_us=0.0, node=node_link, network=network_link)
    return TEN.model_copy(update={"links": links, "ranks_per_node": ranks_per_node})


def _by_hand(mesh: MeshPlan, microbatches: int = 1, machine: Machine = TEN, **changes: object) -> Guess:
    job = Workload(mesh, LENGTH, 1, microbatches, parameter_bytes=2, reduce_bytes=4, matmul_type="bf16", wide_type="bf16")
    return Arithmetic(PLAIN, machine).guess(replace(job, **changes))  # type: ignore[arg-type]


BLOCK_MATMULS = 3 * 2 * LENGTH * WIDTH * UP / 10e12  # forward, and twice in backward
HEAD_MATMULS = 6 * LENGTH * TABLE / 10e12
ATTENTION = 6e6 / 6 * LENGTH * (1 / (4e12 * 0.5) + 2.5 / (5e12 * 0.5))
POINTWISE = 8 * LENGTH * (UP + 5 * WIDTH) * LAYERS * 2 / 500e9  # eight passes over activations of two bytes
COMPUTE = LAYERS * BLOCK_MATMULS + HEAD_MATMULS + ATTENTION + POINTWISE


def test_compute_is_the_time_of_matmuls_attention_and_traffic() -> None:
    found = _by_hand(_mesh())
    assert found.seconds["compute"] == pytest.approx(COMPUTE)
    assert found.seconds["recomputation"] == pytest.approx(0.0)
    assert found.seconds["update"] == pytest.approx(28 * (LAYERS * WIDTH * UP + 2 * TABLE) / 500e9)
    assert found.step_seconds == pytest.approx(sum(found.seconds.values()))
    assert _by_hand(_mesh(), 3).seconds["compute"] == pytest.approx(3 * COMPUTE)
    offloaded = _by_hand(_mesh(), offloads=True)
    assert offloaded.seconds["update"] == pytest.approx(16 * (LAYERS * WIDTH * UP + 2 * TABLE) / 20e9)
    assert offloaded.memory[STATE] == 0.0


MUON = OptimizerCosts(
    state_bytes=8.0, traffic=30.0, matrix_state_bytes=4.0, matrix_flops=lambda rows, columns: 1e3 * rows * columns,
    matrix_type="bf16", exchanged_bytes=6.0, workspace_bytes=1e12, blocks_alike=False,
)  # fmt: skip


def test_an_optimizer_of_matrices_says_what_it_keeps_computes_and_sends() -> None:
    """Of blocks, each parameter is in a matrix."""
    hidden, held = LAYERS * WIDTH * UP, LAYERS * WIDTH * UP + 2 * TABLE
    found = _by_hand(_mesh(dp_shard=4), optimizer=MUON)
    assert found.memory[STATE] == pytest.approx((16 * 2 * TABLE + 12 * hidden) / 4)
    sent = 6 * hidden / 4 * 3 / 4 / (TEN.links.node.bandwidth_gb_s * 1e9)
    latency = 2 * (TEN.links.start_us + 4 * TEN.links.node.latency_us) * 1e-6
    computed = 1e3 * hidden / 4 / (TEN.matmul_of("bf16").achievable_tflops * 1e12)
    assert found.seconds["update"] == pytest.approx(30 * held / 4 / 500e9 + computed + sent + latency)
    assert found.memory["update"] == pytest.approx(1e12 - found.memory["activations"] - found.memory["logits and loss"])
    assert _by_hand(_mesh(dp_shard=4)).memory["update"] == 0.0
    # Stages have their own matrices; all ranks of a stage divide them.
    assert _by_hand(_mesh(dp_replicate=4), optimizer=MUON).seconds["update"] == pytest.approx(30 * held / 500e9 + computed)


def test_experts_are_matrices_of_their_own() -> None:
    block = SIZES.units["blocks.0"]
    assert sum(number for _, _, number in block.weights) == 2 + 2 * EXPERTS
    assert {(rows, columns) for rows, columns, number in block.weights if number == EXPERTS} <= {
        (DIM, HIDDEN),
        (HIDDEN, DIM),
    }


def test_recomputation_repeats_the_forward_pass_of_blocks() -> None:
    found = _by_hand(_mesh(), kept=0.0, recomputed=1.0).seconds
    again = LAYERS * BLOCK_MATMULS * 4 / 3 + HEAD_MATMULS + ATTENTION + 1e9 / 2e12 + POINTWISE * 4 / 3
    assert found["compute"] + found["recomputation"] == pytest.approx(again)
    assert found["recomputation"] == pytest.approx(again / 4)  # four passes, of which one is repeated


def test_a_compiler_moves_three_eighths_of_the_bytes() -> None:
    assert _by_hand(_mesh(), fused=True).seconds["compute"] == pytest.approx(COMPUTE - POINTWISE * 5 / 8)


def test_a_host_that_is_slower_than_the_device_is_waited_for() -> None:
    slow = TEN.model_copy(update={"host": Host(operator_us=1000.0, compiled_kernel_us=500.0)})
    job = Workload(_mesh(), LENGTH, 1, 1, parameter_bytes=2, matmul_type="bf16", wide_type="bf16")
    found = Arithmetic(PLAIN, slow).guess(job).seconds
    assert found["host"] == pytest.approx(LAYERS * 160 * 1e-3 - COMPUTE)
    fused = Arithmetic(PLAIN, slow).guess(replace(job, fused=True)).seconds
    assert fused["compute"] + fused["host"] == pytest.approx(LAYERS * 160 * 0.1e-3)


def test_regions_gather_and_scatter_their_positions() -> None:
    """Four passes (forward and backward of a gather and of a scatter) for each region and for one outside of blocks."""
    found = _by_hand(_mesh(tp=2)).seconds
    calls = 4 * (LAYERS + 1)
    assert found["tp"] == pytest.approx(calls * LENGTH * WIDTH * 2 / 2 / 100e9)
    again = _by_hand(_mesh(tp=2), recomputed=0.5).seconds
    assert again["tp"] == pytest.approx(found["tp"] * 5 / 4)
    assert _by_hand(_mesh(tp=2), 3).seconds["tp"] == pytest.approx(3 * found["tp"])
    overlapped = _by_hand(_mesh(tp=2), overlaps_matmuls=True).seconds
    assert overlapped["tp"] == pytest.approx(found["tp"] / 2)  # one share of two has nothing to overlap with
    four = _by_hand(_mesh(tp=4), overlaps_matmuls=True).seconds["tp"]
    assert four == pytest.approx(_by_hand(_mesh(tp=4)).seconds["tp"] / 4)


def test_each_call_waits_for_the_latency_of_all_ranks_of_its_group() -> None:
    late = TEN.model_copy(
        update={"links": TEN.links.model_copy(update={"node": Link(bandwidth_gb_s=100.0, latency_us=7.0)})}
    )
    found = _by_hand(_mesh(tp=2), machine=late).seconds["tp"] - _by_hand(_mesh(tp=2)).seconds["tp"]
    assert found == pytest.approx(4 * (LAYERS + 1) * 2 * 7e-6)


def test_no_more_than_the_time_of_the_matmuls_is_hidden() -> None:
    far = _with_links(100.0, 0.1, ranks_per_node=1)
    whole = _by_hand(_mesh(tp=2), machine=far).seconds["tp"]
    assert whole == pytest.approx(4 * (LAYERS + 1) * LENGTH * WIDTH * 2 / 2 / 0.1e9)
    matmuls = (LAYERS * BLOCK_MATMULS + HEAD_MATMULS) / 2
    assert whole > matmuls
    found = _by_hand(_mesh(tp=2), machine=far, overlaps_matmuls=True).seconds["tp"]
    assert found == pytest.approx(whole - matmuls / 2)


FEATURES, SECONDS = 1_000_000, 0.0015
"""Of keys and values, and of attention."""


@pytest.mark.parametrize(
    ("ranks", "passes_keys", "links", "expected"),
    [
        # Keys twice in bf16, for forward and backward, beside attention to a rank's own; then their gradients once in fp32.
        (4, False, (10.0, 10.0), FEATURES * 4 * 4 * 3 / 4 / 10e9 - SECONDS / 4 + FEATURES * 4 * 4 * 3 / 4 / 10e9),
        (4, False, (1e4, 10.0), FEATURES * 4 * 4 * 3 / 4 / 1e13),
        # A hop for each further rank, beside attention to others.
        (4, True, (10.0, 10.0), FEATURES * (4 + 4) * 3 / 10e9 - SECONDS * 3 / 4),
        (4, True, (1e4, 10.0), 0.0),
        # Over two nodes, a ring is as slow as its slowest hop; a gather uses the network cards of a node's four ranks.
        (8, False, (1e3, 1.0), FEATURES * 8 * 4 * 7 / 8 / 4e9 - SECONDS / 8 + FEATURES * 8 * 4 * 7 / 8 / 4e9),
        (8, True, (1e3, 1.0), FEATURES * (4 + 4) * 7 / 1e9 - SECONDS * 7 / 8),
    ],
)
def test_keys_are_gathered_before_attention_or_passed_on_beside_it(
    ranks: int, passes_keys: bool, links: tuple[float, float], expected: float
) -> None:
    mesh = _mesh(cp=ranks)
    job = Workload(mesh, LENGTH, 1, 1, parameter_bytes=2, passes_keys=passes_keys)
    found = exchange_seconds(job, group_along(_with_links(*links), mesh, ["cp"]), FEATURES, 1, SECONDS)
    assert found == pytest.approx(expected, abs=1e-12)


def test_all_blocks_and_microbatches_exchange_keys() -> None:
    """What data parallelism does over the same ranks is hidden here."""
    fast, far = _with_links(1e4, 1e4), _with_links(1e4, 1e4, ranks_per_node=1)
    for machine in (fast, far):
        one, three = (_by_hand(_mesh(cp=4), count, machine=machine).seconds["cp"] for count in (1, 3))
        assert one == pytest.approx(LENGTH / 4 * KEYS * LAYERS * 4 * 4 * 3 / 4 / 1e13)
        assert three == pytest.approx(3 * one)


def test_gathered_keys_and_their_gradients_take_memory_for_all_positions_and_passed_ones_for_those_of_two_ranks() -> None:
    gathered, passed = (_by_hand(_mesh(cp=4), passes_keys=which).memory["activations"] for which in (False, True))
    assert gathered - passed == pytest.approx(LENGTH / 4 * KEYS * (2 + 4) * (4 - 2))
    alone = LENGTH / 4 * 2 * LAYERS * (WIDTH + UP + 5 * WIDTH)
    assert passed == pytest.approx(alone + LENGTH / 4 * KEYS * (2 + 4) * 2)


def test_stages_send_hidden_states_and_their_gradients() -> None:
    names = list(PLAIN.units)
    stages = tuple(tuple(part) for part in (names[:2], names[2:3], names[3:4], names[4:]))
    costs = PipelineCosts(
        stages=stages, rank_of=(0, 1, 0, 1), microbatch_size=1, microbatches=6, alive=(2.0, 1.0), idle=0.5
    )  # fmt: skip
    found = _by_hand(_mesh(pp=2), 6, pipeline=costs).seconds
    assert found["pp"] == pytest.approx(2 * 2 * 6 * LENGTH * WIDTH * 2 / 100e9)  # two stages a rank, there and back
    assert found["idle"] == pytest.approx((found["compute"] + found["recomputation"] + found["host"] + found["pp"]) / 2)


def test_data_parallelism_hides_behind_computation_and_waits_for_the_rest() -> None:
    slow, whole = _with_links(2.0, 0.25), LAYERS * WIDTH * UP + 2 * TABLE
    shard = _by_hand(_mesh(dp_shard=4), machine=slow).seconds
    assert shard["dp_shard"] == pytest.approx(whole * (2 * 2 + 4) * 3 / 4 / 2e9 - COMPUTE)
    assert "dp_shard" not in _by_hand(_mesh(dp_shard=4)).seconds  # all of it is hidden by faster links
    stay = _by_hand(_mesh(dp_shard=4), 4, machine=slow, parameters_stay=True, gradients_stay=True).seconds
    assert stay["dp_shard"] == pytest.approx(whole * (2 + 4) * 3 / 4 / 2e9 - 4 * COMPUTE)
    replicate = _by_hand(_mesh(dp_replicate=4), machine=slow).seconds
    assert replicate["dp_replicate"] == pytest.approx(2 * whole * 4 * 3 / 4 / 2e9 - COMPUTE)
    far = _by_hand(_mesh(dp_shard=8), machine=slow).seconds["dp_shard"]  # over two nodes of four network cards each
    assert far == pytest.approx(whole * 8 * 7 / 8 / 1e9 - COMPUTE)


def test_the_memory_of_a_rank() -> None:
    found = _by_hand(_mesh(dp_shard=4)).memory
    whole = LAYERS * WIDTH * UP + 2 * TABLE
    assert found[STATE] == pytest.approx(16 * whole / 4)
    assert found["gathered"] == pytest.approx(2 * TABLE * 2 + TABLE * 4)  # two units' parameters, one unit's gradients
    assert found["activations"] == pytest.approx(LENGTH * 2 * LAYERS * (WIDTH + UP + 5 * WIDTH))
    assert found["logits and loss"] == pytest.approx(LENGTH * WORDS * (4 + 2 * 2))
    assert found["allocator"] == 0.0 and found["context"] == 0.0
    full = _by_hand(_mesh(dp_shard=4), kept=0.0, recomputed=1.0).memory["activations"]
    assert full == pytest.approx(LENGTH * 2 * (LAYERS * WIDTH + UP + 5 * WIDTH))  # the inputs, and one block at work
    fused = _by_hand(_mesh(dp_shard=4), kept=0.0, recomputed=1.0, fused=True).memory["activations"]
    assert fused == pytest.approx(LENGTH * 2 * (LAYERS * WIDTH + 0.75 * (UP + 5 * WIDTH)))
    stay = _by_hand(_mesh(dp_shard=4), parameters_stay=True, gradients_stay=True).memory["gathered"]
    assert stay == pytest.approx(whole * 2 + whole * 4)
    caching = TEN.model_copy(update={"allocator": Allocator(), "context_gib": 1.0})
    job = Workload(_mesh(), LENGTH, 1, 1, parameter_bytes=4)
    found = Arithmetic(PLAIN, caching).guess(job).memory
    others = sum(size for kind, size in found.items() if kind not in ("allocator", "context"))
    assert (found["allocator"], found["context"]) == (pytest.approx(0.12 * others), 2**30)
    guess = Arithmetic(PLAIN, caching).guess(job)
    assert guess.peak_gib == pytest.approx((others * 1.12 + 2**30) / 2**30)
    assert guess.least_gib == pytest.approx((found[STATE] + 2**30) / 2**30)


def test_the_logits_of_a_chunk_are_no_more_than_a_gibibyte() -> None:
    rows = 2**30 / 4 / WORDS
    long = Workload(_mesh(), 10_000, 1, 1, parameter_bytes=2, matmul_type="bf16", wide_type="bf16")
    assert rows < 10_000
    assert Arithmetic(PLAIN, TEN).guess(long).memory["logits and loss"] == pytest.approx(2**30 / 4 * (4 + 2 * 2))


def test_a_stage_without_the_head_has_no_logits() -> None:
    names = list(PLAIN.units)
    stages = (tuple(names[:-1]), tuple(names[-1:]))  # the first stage has all blocks, and takes most memory
    costs = PipelineCosts(stages=stages, rank_of=(0, 1), microbatch_size=1, microbatches=9, alive=(9.0, 1.0), idle=0.0)
    assert _by_hand(_mesh(pp=2), 9, pipeline=costs).memory["logits and loss"] == 0.0


@pytest.mark.parametrize(
    ("guess_gib", "activations", "factor", "exact", "expected"),
    [
        (100.0, 40.0, None, False, 80.0),
        (100.0, 40.0, None, True, 100.0),
        (100.0, 40.0, 1.0, False, 100.0),
        (100.0, 40.0, 1.5, True, 120.0),
        (100.0, 40.0, 0.5, False, 80.0),
    ],
)
def test_the_memory_that_estimates_correct(
    guess_gib: float, activations: float, factor: float | None, exact: bool, expected: float
) -> None:
    memory = {STATE: (guess_gib - activations) * 2**30, "activations": activations * 2**30}
    assert corrected(Guess(memory, {}), factor, exact) == pytest.approx(expected)


def test_the_reason_of_a_loser_is_where_it_takes_most_more_time() -> None:
    best = Guess({}, {"compute": 10.0, "recomputation": 2.0, "tp": 1.0})
    assert _reason(Guess({}, {"compute": 10.5, "recomputation": 2.0, "tp": 3.0}), best) == "network: tp"
    assert _reason(Guess({}, {"compute": 10.0, "recomputation": 4.0, "cp": 1.0}), best) == "recomputation"
    assert _reason(Guess({}, {"compute": 9.0, "recomputation": 2.0, "idle": 1.0}), best) == "pipeline bubble"
    assert _reason(Guess({}, {"compute": 12.0}), best) == "computation: small matmuls or an uneven pipeline"
    assert _reason(Guess({}, {"host": 2.0}), best) == "the host: small microbatches"
    assert _reason(Guess({}, {"update": 2.0}), best) == "optimizer step"


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.75, "about 25% fewer tokens/s than the best"),
        (2.0, "about 100% more tokens/s, not estimated"),  # half of the time
        (0.996, "about as fast, not estimated"),
    ],
)
def test_how_fast_a_loser_is(share: float, words: str) -> None:
    assert _speed(share) == words
