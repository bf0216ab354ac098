"""The memory of a rank, by hand and as the mesh divides it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.planned import BLOCKS, DIM, EXPERTS, HIDDEN, VOCABULARY, decoder_sizes, guess_of, mesh_of, workload
from harness.planned_by_hand import KEYS, LAYERS, LENGTH, PLAIN, TABLE, TEN, UP, WIDTH, WORDS, by_hand
from titan_core.api import MeshPlan, MeshView, PipelineCosts
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_simulate.hardware.machine import Allocator
from titan_simulate.hardware.read import read_machine
from titan_simulate.plan.arithmetic import Arithmetic
from titan_simulate.plan.workload import STATE, Workload


def test_what_computes_in_fp32_is_gathered_in_fp32() -> None:
    machine, none = read_machine("h100"), (0, 0, 0)
    for pattern, on_one, on_tp, on_ep in (
        ("none", *none),
        ("*.q.weight", DIM**2, DIM**2 // 2, DIM**2),
        ("blocks.*.norm.weight", DIM, DIM, DIM),
        ("*.experts.up", EXPERTS * DIM * HIDDEN, EXPERTS * DIM * HIDDEN, 2 * DIM * HIDDEN),
    ):
        exact = Arithmetic(decoder_sizes(exact=(pattern,)), machine)
        for mesh, more in (
            (mesh_of(dp_shard=8), on_one),
            (mesh_of(dp_shard=4, tp=2), on_tp),
            (mesh_of(dp_shard=8, ep=4), on_ep),
        ):
            found = exact.guess(workload(mesh)).memory["gathered"] - guess_of(mesh).memory["gathered"]
            assert found == pytest.approx(2 * BLOCKS * more, abs=1)


TABLES, BLOCK = 2 * VOCABULARY * DIM + DIM, 2 * DIM**2 + DIM + EXPERTS * 2 * DIM * HIDDEN


@pytest.mark.parametrize(
    ("mesh", "bytes_"),
    [
        (mesh_of(), 16 * (TABLES + BLOCKS * BLOCK)),
        (mesh_of(tp=2), 16 * (VOCABULARY * DIM + DIM + BLOCKS * (DIM**2 + DIM + EXPERTS * 2 * DIM * HIDDEN))),
        (mesh_of(dp_shard=8), 2 * (TABLES + BLOCKS * BLOCK)),
        # The ranks of a view hold an expert once, and data parallelism shards it over what remains of them.
        (mesh_of(dp_shard=8, ep=4), 2 * (TABLES + BLOCKS * BLOCK)),
        (mesh_of(dp_replicate=8), 16 * (TABLES + BLOCKS * BLOCK)),
    ],
    ids=["one", "weights", "shard", "view", "replicate"],
)  # fmt: skip
def test_state_is_divided_as_the_mesh_divides_it(mesh: MeshPlan, bytes_: int) -> None:
    assert guess_of(mesh).memory[STATE] == pytest.approx(bytes_)


def test_experts_on_ranks_that_divide_weights_are_held_once() -> None:
    """State of 16 bytes a parameter: with 8 ranks of tensor parallelism each holds 1/8 of the experts, not all of them."""
    degrees = {dim.name: {"tp": 8}.get(dim.name, 1) for dim in STANDARD_DIMS}
    view = MeshView("ep", "x.ep", ("dp_shard", "cp", "tp"), folds_weights=True)
    experts = BLOCKS * 2 * EXPERTS * DIM * HIDDEN
    for degree in (2, 8):
        folds = guess_of(MeshPlan(STANDARD_DIMS, degrees, (view,), {"ep": degree}))
        assert guess_of(mesh_of(tp=8)).memory[STATE] - folds.memory[STATE] == pytest.approx(16 * experts * 7 / 8)


def test_views_without_parameters_divide_none() -> None:
    view = MeshView("heads", "x.heads", ("cp",), shards_parameters=False)
    degrees = {dim.name: {"cp": 4}.get(dim.name, 1) for dim in STANDARD_DIMS}
    mesh = MeshPlan(STANDARD_DIMS, degrees, (view,), {"heads": 4})
    assert (
        guess_of(mesh).memory == guess_of(mesh_of(cp=4)).memory and guess_of(mesh).seconds == guess_of(mesh_of(cp=4)).seconds
    )


@pytest.mark.parametrize(
    ("mesh", "divisor"), [(mesh_of(pp=2), 1), (mesh_of(pp=2, tp=2, dp_shard=4), 8)], ids=["pp", "pp, tp, shard"]
)
def test_a_weight_that_two_stages_share_is_in_both_and_its_optimizer_state_in_one(mesh: MeshPlan, divisor: int) -> None:
    sizes = decoder_sizes(tied=True)
    names = list(sizes.units)
    costs = PipelineCosts(
        stages=(tuple(names[:2]), tuple(names[2:])), rank_of=(0, 1), microbatch_size=1, microbatches=4,
        alive=(2.0, 1.0), idle=0.25,
    )  # fmt: skip
    tied, alone = (
        Arithmetic(each, read_machine("h100")).guess(workload(mesh, pipeline=costs)).memory[STATE]
        for each in (sizes, replace(sizes, ties=()))
    )
    assert tied - alone == pytest.approx(8 * VOCABULARY * DIM / divisor)
    one = Arithmetic(sizes, read_machine("h100"))
    assert one.guess(workload(mesh_of())).memory[STATE] == pytest.approx(16 * (TABLES - VOCABULARY * DIM + BLOCKS * BLOCK))


def test_gathered_keys_and_their_gradients_take_memory_for_all_positions_and_passed_ones_for_those_of_two_ranks() -> None:
    gathered, passed = (by_hand(mesh_of(cp=4), passes_keys=which).memory["activations"] for which in (False, True))
    assert gathered - passed == pytest.approx(LENGTH / 4 * KEYS * (2 + 4) * (4 - 2))
    alone = LENGTH / 4 * 2 * LAYERS * (WIDTH + UP + 5 * WIDTH)
    assert passed == pytest.approx(alone + LENGTH / 4 * KEYS * (2 + 4) * 2)


def test_the_memory_of_a_rank() -> None:
    found = by_hand(mesh_of(dp_shard=4)).memory
    whole = LAYERS * WIDTH * UP + 2 * TABLE
    assert found[STATE] == pytest.approx(16 * whole / 4)
    assert found["gathered"] == pytest.approx(2 * TABLE * 2 + TABLE * 4)  # two units' parameters, one unit's gradients
    assert found["activations"] == pytest.approx(LENGTH * 2 * LAYERS * (WIDTH + UP + 5 * WIDTH))
    assert found["logits and loss"] == pytest.approx(LENGTH * WORDS * (4 + 2 * 2))
    assert found["allocator"] == 0.0 and found["context"] == 0.0
    full = by_hand(mesh_of(dp_shard=4), kept=0.0, recomputed=1.0).memory["activations"]
    assert full == pytest.approx(LENGTH * 2 * (LAYERS * WIDTH + UP + 5 * WIDTH))  # the inputs, and one block at work
    fused = by_hand(mesh_of(dp_shard=4), kept=0.0, recomputed=1.0, fused=True).memory["activations"]
    assert fused == pytest.approx(LENGTH * 2 * (LAYERS * WIDTH + 0.75 * (UP + 5 * WIDTH)))
    stay = by_hand(mesh_of(dp_shard=4), parameters_stay=True, gradients_stay=True).memory["gathered"]
    assert stay == pytest.approx(whole * 2 + whole * 4)
    caching = TEN.model_copy(update={"allocator": Allocator(), "context_gib": 1.0})
    job = Workload(mesh_of(), LENGTH, 1, 1, parameter_bytes=4)
    found = Arithmetic(PLAIN, caching).guess(job).memory
    others = sum(size for kind, size in found.items() if kind not in ("allocator", "context"))
    assert (found["allocator"], found["context"]) == (pytest.approx(0.12 * others), 2**30)
    guess = Arithmetic(PLAIN, caching).guess(job)
    assert guess.peak_gib == pytest.approx((others * 1.12 + 2**30) / 2**30)
    assert guess.least_gib == pytest.approx((found[STATE] + 2**30) / 2**30)


def test_the_logits_of_a_chunk_are_no_more_than_a_gibibyte() -> None:
    rows = 2**30 / 4 / WORDS
    long = Workload(mesh_of(), 10_000, 1, 1, parameter_bytes=2, matmul_type="bf16", wide_type="bf16")
    assert rows < 10_000
    assert Arithmetic(PLAIN, TEN).guess(long).memory["logits and loss"] == pytest.approx(2**30 / 4 * (4 + 2 * 2))


def test_a_stage_without_the_head_has_no_logits() -> None:
    names = list(PLAIN.units)
    stages = (tuple(names[:-1]), tuple(names[-1:]))  # the first stage has all blocks, and takes most memory
    costs = PipelineCosts(stages=stages, rank_of=(0, 1), microbatch_size=1, microbatches=9, alive=(9.0, 1.0), idle=0.0)
    assert by_hand(mesh_of(pp=2), 9, pipeline=costs).memory["logits and loss"] == 0.0
