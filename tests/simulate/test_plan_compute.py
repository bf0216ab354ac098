"""The time that a rank computes, updates, waits for the host and idles, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.planned import SIZES, guess_of, mesh_of
from harness.planned_by_hand import (
    ATTENTION,
    BLOCK_MATMULS,
    COMPUTE,
    HEAD_MATMULS,
    LAYERS,
    LENGTH,
    PLAIN,
    POINTWISE,
    TABLE,
    TEN,
    UP,
    WIDTH,
    by_hand,
)
from titan_core.api import OptimizerCosts, PipelineCosts
from titan_simulate.hardware.machine import Host
from titan_simulate.plan.arithmetic import Arithmetic
from titan_simulate.plan.workload import STATE, Workload


def test_recomputation_trades_time_for_memory() -> None:
    keeps, recomputes = guess_of(mesh_of(dp_shard=8)), guess_of(mesh_of(dp_shard=8), kept=0.0, recomputed=1.0)
    assert recomputes.memory["activations"] < keeps.memory["activations"] / 3
    assert recomputes.seconds["recomputation"] == pytest.approx(keeps.seconds["compute"] / 3, rel=0.2)


def test_a_pipeline_idles_and_its_worst_rank_counts() -> None:
    names = list(SIZES.units)
    stages = (tuple(names[:3]), tuple(names[3:]))  # two blocks, and six with the head
    costs = PipelineCosts(
        stages=stages, rank_of=(0, 1), microbatch_size=1, microbatches=4, alive=(2.0, 1.0), idle=0.25
    )  # fmt: skip
    uneven = guess_of(mesh_of(pp=2), pipeline=costs)
    busy = sum(seconds for kind, seconds in uneven.seconds.items() if kind not in ("idle", "update"))
    assert uneven.seconds["idle"] == pytest.approx(busy / 4)
    even = replace(costs, stages=(tuple(names[:5]), tuple(names[5:])))
    assert guess_of(mesh_of(pp=2), pipeline=even).step_seconds < uneven.step_seconds
    more_alive = replace(costs, alive=(2.0, 4.0))
    assert guess_of(mesh_of(pp=2), pipeline=more_alive).memory["activations"] > uneven.memory["activations"]


def test_a_type_that_computes_faster_takes_less_time() -> None:
    mesh = mesh_of(dp_shard=8)
    assert guess_of(mesh, matmul_type="fp8").step_seconds < guess_of(mesh).step_seconds


def test_compute_is_the_time_of_matmuls_attention_and_traffic() -> None:
    found = by_hand(mesh_of())
    assert found.seconds["compute"] == pytest.approx(COMPUTE)
    assert found.seconds["recomputation"] == pytest.approx(0.0)
    assert found.seconds["update"] == pytest.approx(28 * (LAYERS * WIDTH * UP + 2 * TABLE) / 500e9)
    assert found.step_seconds == pytest.approx(sum(found.seconds.values()))
    assert by_hand(mesh_of(), 3).seconds["compute"] == pytest.approx(3 * COMPUTE)
    offloaded = by_hand(mesh_of(), offloads=True)
    assert offloaded.seconds["update"] == pytest.approx(16 * (LAYERS * WIDTH * UP + 2 * TABLE) / 20e9)
    assert offloaded.memory[STATE] == 0.0


MUON = OptimizerCosts(
    state_bytes=8.0, traffic=30.0, matrix_state_bytes=4.0, matrix_flops=lambda rows, columns: 1e3 * rows * columns,
    matrix_type="bf16", exchanged_bytes=6.0, workspace_bytes=1e12, blocks_alike=False,
)  # fmt: skip


def test_an_optimizer_of_matrices_says_what_it_keeps_computes_and_sends() -> None:
    """Of blocks, each parameter is in a matrix."""
    hidden, held = LAYERS * WIDTH * UP, LAYERS * WIDTH * UP + 2 * TABLE
    found = by_hand(mesh_of(dp_shard=4), optimizer=MUON)
    assert found.memory[STATE] == pytest.approx((16 * 2 * TABLE + 12 * hidden) / 4)
    sent = 6 * hidden / 4 * 3 / 4 / (TEN.links.node.bandwidth_gb_s * 1e9)
    latency = 2 * (TEN.links.start_us + 4 * TEN.links.node.latency_us) * 1e-6
    computed = 1e3 * hidden / 4 / (TEN.matmul_of("bf16").achievable_tflops * 1e12)
    assert found.seconds["update"] == pytest.approx(30 * held / 4 / 500e9 + computed + sent + latency)
    assert found.memory["update"] == pytest.approx(1e12 - found.memory["activations"] - found.memory["logits and loss"])
    assert by_hand(mesh_of(dp_shard=4)).memory["update"] == 0.0
    # Stages have their own matrices; all ranks of a stage divide them.
    assert by_hand(mesh_of(dp_replicate=4), optimizer=MUON).seconds["update"] == pytest.approx(30 * held / 500e9 + computed)


def test_recomputation_repeats_the_forward_pass_of_blocks() -> None:
    found = by_hand(mesh_of(), kept=0.0, recomputed=1.0).seconds
    again = LAYERS * BLOCK_MATMULS * 4 / 3 + HEAD_MATMULS + ATTENTION + 1e9 / 2e12 + POINTWISE * 4 / 3
    assert found["compute"] + found["recomputation"] == pytest.approx(again)
    assert found["recomputation"] == pytest.approx(again / 4)  # four passes, of which one is repeated


def test_a_compiler_moves_three_eighths_of_the_bytes() -> None:
    assert by_hand(mesh_of(), fused=True).seconds["compute"] == pytest.approx(COMPUTE - POINTWISE * 5 / 8)


def test_a_host_that_is_slower_than_the_device_is_waited_for() -> None:
    slow = TEN.model_copy(update={"host": Host(operator_us=1000.0, compiled_kernel_us=500.0)})
    job = Workload(mesh_of(), LENGTH, 1, 1, parameter_bytes=2, matmul_type="bf16", wide_type="bf16")
    found = Arithmetic(PLAIN, slow).guess(job).seconds
    assert found["host"] == pytest.approx(LAYERS * 160 * 1e-3 - COMPUTE)
    fused = Arithmetic(PLAIN, slow).guess(replace(job, fused=True)).seconds
    assert fused["compute"] + fused["host"] == pytest.approx(LAYERS * 160 * 0.1e-3)
    assert by_hand(mesh_of(), machine=slow, graphed=True).seconds["host"] == 0.0
