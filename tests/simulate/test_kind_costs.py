"""Costs of blocks from two traces, and jobs that are composed of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from titan_core.api import PipelineCosts
from titan_simulate.engine.result import AllocationTrace, Owner, SimulatedRank, StepFigures
from titan_simulate.estimate.reduce import Parts
from titan_simulate.estimate.roofline import collective_seconds, seconds_of
from titan_simulate.estimate.traced_rank import TracedRank
from titan_simulate.estimate.work import Data, Kind, Work
from titan_simulate.hardware.read import read_machine
from titan_simulate.plan.compose import Arrangement, compose, holdings, least_gib, least_seconds, least_step
from titan_simulate.plan.kind_costs import DataParallel, KindCosts
from titan_simulate.plan.traced_kind import HEAD, OTHERS, TracedKind

MACHINE = read_machine("h100")
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
MIB = 2**20
DATA_RANKS = (0, 1)


def matmul(module: str, phase: str, batch: int, flops: int = 4 * 10**12) -> Work:
    return Work(
        Kind.MATMUL, "aten::mm", phase, module, "0", (), (Data(1, 2**20 * batch),), (Data(2, 2**20 * batch),),
        flops=flops * batch, sizes=(1, 8192 * batch, 8192, 8192),
    )  # fmt: skip


def collective(name: str, phase: str, module: str, stream: str = "9") -> Work:
    return Work(Kind.COLLECTIVE, name, phase, module, stream, (), ranks=DATA_RANKS, group="data", bytes=256 * MIB)


def traced(batch: int) -> TracedRank:
    """Return a trace of three blocks: a matmul forward and two backward each, and FSDP's collectives beside them."""
    work = [matmul("embed", "forward", batch, 10**12)]
    for block in BLOCKS:
        work += [collective("c10d::_allgather_base_", "forward", block), matmul(f"{block}.mlp", "forward", batch)]
    work += [matmul("out", "forward", 1, 10**12) for _ in range(batch)]  # chunks of the loss
    for block in reversed(BLOCKS):
        work += [collective("c10d::_allgather_base_", "backward", block)]
        work += [matmul(f"{block}.mlp", "backward", batch), matmul(f"{block}.mlp", "backward", batch)]
        work += [collective("c10d::_reduce_scatter_base_", "backward", block)]
    work += [Work(Kind.POINTWISE, "aten::_foreach_add_", "optimizer", "", "0", (), (Data(9, 2**30),))]
    state = {(Owner.PARAMETERS, "", ""): 100 * MIB, (Owner.OPTIMIZER, "", ""): 200 * MIB}
    own = {(Owner.ACTIVATIONS, f"{block}.mlp", ""): 100 * MIB * batch for block in BLOCKS}
    loss = {(Owner.LOSS, "out", ""): 50 * MIB}
    after = {**state, (Owner.GRADIENTS, "", ""): 100 * MIB}
    peaks = {"forward out": {**state, **own, **loss}, "optimizer": after}
    found = SimulatedRank(
        0, 2, "", "", StepFigures(0, (), (), (), 0, 0.0), (), {}, 0, AllocationTrace(((1, MIB, 0), (1, 0, 0)))
    )
    parts = Parts([3], [BLOCKS], [], elements=[Counter({**dict.fromkeys(BLOCKS, 1000), "embed": 500, "out": 500})])
    return TracedRank(0, work, found, parts, 1, None, peaks)


def costs(size: int = 1) -> KindCosts:
    """
    Args:
        size: of parameters, by what they are otherwise.
    """
    samples = [
        replace(one, trace=[replace(work, bytes=size * work.bytes) for work in one.trace]) for one in (traced(1), traced(2))
    ]
    return KindCosts(traced_kind(*samples), MACHINE)


def traced_kind(one: TracedRank, two: TracedRank) -> TracedKind:
    return TracedKind(
        one=one, two=two, classes=[0] * 3, blocks="blocks", head=["out"],
        data_groups=lambda ranks: ranks == DATA_RANKS, ranks=2,
    )  # fmt: skip


def arrangement(batch: int = 1, microbatches: int = 1, **changes: object) -> Arrangement:
    return replace(Arrangement(batch, microbatches, DataParallel(Fraction(1), (0,))), **changes)  # type: ignore[arg-type]


CLASSES = {f"blocks.{number}": 0 for number in range(8)}
WHOLE = holdings(CLASSES, None)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_operators_scale_with_the_microbatch(batch: int) -> None:
    passes = costs().passes(batch)
    block, chunk = (seconds_of(one, MACHINE) for one in (matmul("", "", batch), matmul("", "", 1, 10**12)))
    assert passes.forward[0] == pytest.approx(block, rel=1e-2)
    assert passes.backward[0] == pytest.approx(2 * block, rel=1e-2)
    assert passes.forward[HEAD] == pytest.approx(batch * chunk, rel=1e-2)
    assert passes.forward[OTHERS] == pytest.approx(seconds_of(matmul("", "", batch, 10**12), MACHINE), rel=5e-2)
    assert passes.once == pytest.approx(seconds_of(traced(1).trace[-1], MACHINE), rel=1e-2)


def test_collectives_of_data_parallelism_run_on_the_groups_of_the_job() -> None:
    wide, found = DataParallel(Fraction(64), (0,)), costs(32)  # they take longer than what is computed
    gather = collective_seconds("c10d::_allgather_base_", 32 * 256 * MIB, range(128), MACHINE)
    alone, every = found.passes(1), found.passes(1, wide)
    assert alone.forward[0] < every.forward[0] == pytest.approx(gather, rel=1e-2)
    assert alone.backward[0] < every.backward[0] == pytest.approx(2 * gather, rel=1e-2)
    once = found.passes(1, wide, frozenset({"forward"}))
    assert sum(alone.forward.values()) < sum(once.forward.values()) and once.backward[0] < every.backward[0]
    assert found.passes(1, DataParallel(Fraction(1, 2), (0,))).forward == pytest.approx(alone.forward)


def test_replicas_sum_the_shards_of_a_reduction_beside_what_follows() -> None:
    nodes = tuple(range(0, 512, 8))
    alone, summed = (costs(32).passes(1, DataParallel(Fraction(1, 2), ranks)).backward for ranks in ((0,), nodes))
    each = collective_seconds("allreduce", 32 * 256 * MIB, nodes, MACHINE)
    assert summed[0] == pytest.approx(each, rel=5e-2)  # longer than the computation, which hides the rest
    assert each > alone[0]


def test_a_step_is_the_sum_of_its_blocks_and_of_what_nothing_hides() -> None:
    found, passes = costs(), costs().passes(1)
    one = passes.forward[0] + passes.backward[0]
    rest = sum(phase[place] for phase in (passes.forward, passes.backward) for place in (OTHERS, HEAD))
    step = compose(found, WHOLE, arrangement(microbatches=3))
    assert step.seconds["compute"] == pytest.approx(3 * (8 * one + rest))
    assert least_seconds(found, WHOLE[0][1], 1) * 3 == pytest.approx(step.seconds["compute"])
    assert step.seconds["data parallelism"] > 0.0  # the first gather, the last reduction, and contention
    assert step.seconds["update"] == pytest.approx(passes.once * (8 * 1000 + 1000) / (3 * 1000 + 1000))
    wide = arrangement(data=DataParallel(Fraction(64), (0,)))
    gather = collective_seconds("c10d::_allgather_base_", 32 * 256 * MIB, range(128), MACHINE)
    assert compose(costs(32), WHOLE, wide).step_seconds > 8 * 3 * 0.99 * gather
    once = compose(costs(32), WHOLE, replace(wide, parameters_stay=True))  # gathered for forward only
    assert once.step_seconds < compose(costs(32), WHOLE, wide).step_seconds - 0.9 * 8 * gather
    kept = replace(wide, microbatches=3, gradients_stay=True)
    apart = compose(costs(32), WHOLE, replace(wide, microbatches=3)).step_seconds
    assert apart - compose(costs(32), WHOLE, kept).step_seconds == pytest.approx(2 * 8 * gather, rel=5e-2)
    assert compose(costs(32), WHOLE, replace(kept, parameters_stay=True)).step_seconds < apart - 2 * 8 * 2 * gather


def test_a_rank_holds_its_state_and_what_its_blocks_keep() -> None:
    memory = compose(costs(), WHOLE, arrangement(2)).memory
    assert memory["activations"] == pytest.approx((8 * 100 * 2 + 50) * MIB)
    assert memory["parameters, gradients, optimizer"] == pytest.approx(300 * MIB * 9000 / 4000)
    again = compose(costs(), WHOLE, arrangement(2, 3)).memory  # gradients of the microbatches before
    assert again["parameters, gradients, optimizer"] == pytest.approx(400 * MIB * 9000 / 4000)
    shared = compose(costs(), WHOLE, arrangement(2, data=DataParallel(Fraction(4), (0,)))).memory
    assert shared["parameters, gradients, optimizer"] == pytest.approx(75 * MIB * 9000 / 4000)
    stay = compose(costs(), WHOLE, arrangement(parameters_stay=True, width=0.5)).memory
    assert stay["gathered"] == pytest.approx(8 * 128 * MIB)


def test_a_pipeline_divides_blocks_waits_and_keeps_microbatches() -> None:
    stages = (("embed", *list(CLASSES)[:4]), (*list(CLASSES)[4:], "out"))
    pipeline = PipelineCosts(stages=stages, rank_of=(0, 1), microbatch_size=1, microbatches=4, alive=(2.0, 1.0), idle=0.25)
    held = holdings(CLASSES, pipeline)
    assert {rank: dict(blocks) for rank, blocks in held} == {0: {0: 4, OTHERS: 1}, 1: {0: 4, HEAD: 1}}
    job = arrangement(1, 4, pipeline=pipeline)
    step, passes = compose(costs(), held, job), costs().passes(1)
    slowest = max(
        4 * (passes.forward[0] + passes.backward[0]) + passes.forward[place] + passes.backward[place]
        for place in (OTHERS, HEAD)
    )  # fmt: skip
    assert step.seconds["compute"] == pytest.approx(4 * slowest)
    assert step.seconds["idle"] == pytest.approx(slowest)
    # Two microbatches of four blocks on the first rank.
    assert step.memory["activations"] == pytest.approx((2 * 4 * 100) * MIB)
    assert least_step(costs(), held, job, 1.0) <= step.step_seconds
    assert least_gib(costs(), held, job, 1.0, world_size=2) <= step.peak_gib


def test_an_operator_waits_for_the_same_one_in_a_longer_trace() -> None:
    """Two sequences are gathered one by one, so that everything after it has another position."""
    exchange = Work(
        Kind.COLLECTIVE, "_c10d_functional::all_to_all_single", "forward", "blocks.1.mlp", "x collectives", (),
        ranks=tuple(range(16)), group="x", bytes=256 * MIB,
    )  # fmt: skip

    def with_exchange(batch: int) -> TracedRank:
        found = traced(batch)
        place = next(number for number, one in enumerate(found.trace) if one.module == "blocks.1.mlp")
        before = [replace(matmul("embed", "forward", 1, 10**9), name="aten::cat") for _ in range(batch - 1)]
        product = replace(found.trace[place], after=(place + batch - 1,))
        sent = replace(exchange, after=(place + batch - 3,))  # the matmul before the gather of parameters
        work = [*before, *found.trace[:place], sent, product, *found.trace[place + 1 :]]
        return replace(found, trace=work)

    alone, waits = costs(), KindCosts(traced_kind(with_exchange(1), with_exchange(2)), MACHINE)
    more = waits.passes(2).forward[0] - alone.passes(2).forward[0]
    assert more == pytest.approx(seconds_of(exchange, MACHINE), rel=0.1)


def test_experts_count_as_one_product_at_full_speed() -> None:
    grouped = replace(matmul("blocks.1.mlp.experts", "forward", 1), name="aten::_grouped_mm", sizes=(64, 100, 8192, 8192))
    copies = replace(grouped, kind=Kind.POINTWISE, name="aten::copy_", flops=0, reads=(Data(1, 2**30),))
    kind = replace(traced_kind(traced(1), traced(2)), experts=["blocks.*.mlp.experts"])
    one = kind.as_one_expert(grouped)
    assert seconds_of(one, MACHINE) < seconds_of(grouped, MACHINE) and one.sizes == (1, 64 * 100, 8192, 8192)
    assert seconds_of(kind.as_one_expert(copies), MACHINE) == 0.0
    other = matmul("blocks.1.attention", "forward", 1)
    assert kind.as_one_expert(other) is other
