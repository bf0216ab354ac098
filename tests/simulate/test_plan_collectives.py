"""The time that a rank communicates, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.planned import BLOCKS, DIM, SIZES, guess_of, mesh_of, workload
from harness.planned_by_hand import (
    BLOCK_MATMULS,
    COMPUTE,
    HEAD_MATMULS,
    KEYS,
    LAYERS,
    LENGTH,
    PLAIN,
    TABLE,
    TEN,
    UP,
    WIDTH,
    by_hand,
    with_links,
)
from titan_core.api import PipelineCosts, causal_attention
from titan_simulate.hardware.machine import Link
from titan_simulate.hardware.read import read_machine
from titan_simulate.plan.arithmetic import Arithmetic
from titan_simulate.plan.groups import group_along
from titan_simulate.plan.rank_collectives import exchange_seconds
from titan_simulate.plan.workload import Guess, Workload


def test_a_group_within_a_node_communicates_faster() -> None:
    near, far = guess_of(mesh_of(dp_shard=2, tp=8)), guess_of(mesh_of(tp=16))
    assert 0 < near.seconds["tp"] < far.seconds["tp"]
    # The same dimension in another place: its neighbours are in other nodes.
    inner, outer = guess_of(mesh_of(cp=2, dp_shard=8)), guess_of(mesh_of(cp=2, tp=8))
    assert inner.seconds["cp"] < outer.seconds["cp"] * 8


def test_exchanging_heads_costs_less_the_more_ranks_there_are_and_rings_do_not() -> None:

    def guess(ranks: int, heads: int = 1) -> Guess:
        return guess_of(mesh_of(cp=ranks, dp_shard=2), seq_len=2**17, exchanges_heads=heads)

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
        job = workload(mesh_of(cp=4, dp_shard=2), seq_len=2**17)
        return Arithmetic(replace(SIZES, units=units), read_machine("h100")).guess(job)

    whole, half, few = ring(None), ring(2**14), ring(2**10)
    assert few.seconds["cp"] < half.seconds["cp"] < whole.seconds["cp"]
    assert few.memory["activations"] < half.memory["activations"] < whole.memory["activations"]
    assert ring(2**17).seconds == whole.seconds


def test_regions_gather_and_scatter_their_positions() -> None:
    """Four passes (forward and backward of a gather and of a scatter) for each region and for one outside of blocks."""
    found = by_hand(mesh_of(tp=2)).seconds
    calls = 4 * (LAYERS + 1)
    assert found["tp"] == pytest.approx(calls * LENGTH * WIDTH * 2 / 2 / 100e9)
    again = by_hand(mesh_of(tp=2), recomputed=0.5).seconds
    assert again["tp"] == pytest.approx(found["tp"] * 5 / 4)
    assert by_hand(mesh_of(tp=2), 3).seconds["tp"] == pytest.approx(3 * found["tp"])
    overlapped = by_hand(mesh_of(tp=2), overlaps_matmuls=True).seconds
    assert overlapped["tp"] == pytest.approx(found["tp"] / 2)  # one share of two has nothing to overlap with
    four = by_hand(mesh_of(tp=4), overlaps_matmuls=True).seconds["tp"]
    assert four == pytest.approx(by_hand(mesh_of(tp=4)).seconds["tp"] / 4)


def test_each_call_waits_for_the_latency_of_all_ranks_of_its_group() -> None:
    late = TEN.model_copy(
        update={"links": TEN.links.model_copy(update={"node": Link(bandwidth_gb_s=100.0, latency_us=7.0)})}
    )
    found = by_hand(mesh_of(tp=2), machine=late).seconds["tp"] - by_hand(mesh_of(tp=2)).seconds["tp"]
    assert found == pytest.approx(4 * (LAYERS + 1) * 2 * 7e-6)


def test_no_more_than_the_time_of_the_matmuls_is_hidden() -> None:
    far = with_links(100.0, 0.1, ranks_per_node=1)
    whole = by_hand(mesh_of(tp=2), machine=far).seconds["tp"]
    assert whole == pytest.approx(4 * (LAYERS + 1) * LENGTH * WIDTH * 2 / 2 / 0.1e9)
    matmuls = (LAYERS * BLOCK_MATMULS + HEAD_MATMULS) / 2
    assert whole > matmuls
    found = by_hand(mesh_of(tp=2), machine=far, overlaps_matmuls=True).seconds["tp"]
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
    mesh = mesh_of(cp=ranks)
    job = Workload(mesh, LENGTH, 1, 1, parameter_bytes=2, passes_keys=passes_keys)
    found = exchange_seconds(job, group_along(with_links(*links), mesh, ["cp"]), FEATURES, 1, SECONDS)
    assert found == pytest.approx(expected, abs=1e-12)


def test_all_blocks_and_microbatches_exchange_keys() -> None:
    """What data parallelism does over the same ranks is hidden here."""
    fast, far = with_links(1e4, 1e4), with_links(1e4, 1e4, ranks_per_node=1)
    for machine in (fast, far):
        one, three = (by_hand(mesh_of(cp=4), count, machine=machine).seconds["cp"] for count in (1, 3))
        assert one == pytest.approx(LENGTH / 4 * KEYS * LAYERS * 4 * 4 * 3 / 4 / 1e13)
        assert three == pytest.approx(3 * one)


def test_stages_send_hidden_states_and_their_gradients() -> None:
    names = list(PLAIN.units)
    stages = tuple(tuple(part) for part in (names[:2], names[2:3], names[3:4], names[4:]))
    costs = PipelineCosts(
        stages=stages, rank_of=(0, 1, 0, 1), microbatch_size=1, microbatches=6, alive=(2.0, 1.0), idle=0.5
    )  # fmt: skip
    found = by_hand(mesh_of(pp=2), 6, pipeline=costs).seconds
    assert found["pp"] == pytest.approx(2 * 2 * 6 * LENGTH * WIDTH * 2 / 100e9)  # two stages a rank, there and back
    assert found["idle"] == pytest.approx((found["compute"] + found["recomputation"] + found["host"] + found["pp"]) / 2)


def test_data_parallelism_hides_behind_computation_and_waits_for_the_rest() -> None:
    slow, whole = with_links(2.0, 0.25), LAYERS * WIDTH * UP + 2 * TABLE
    shard = by_hand(mesh_of(dp_shard=4), machine=slow).seconds
    assert shard["dp_shard"] == pytest.approx(whole * (2 * 2 + 4) * 3 / 4 / 2e9 - COMPUTE)
    assert "dp_shard" not in by_hand(mesh_of(dp_shard=4)).seconds  # all of it is hidden by faster links
    stay = by_hand(mesh_of(dp_shard=4), 4, machine=slow, parameters_stay=True, gradients_stay=True).seconds
    assert stay["dp_shard"] == pytest.approx(whole * (2 + 4) * 3 / 4 / 2e9 - 4 * COMPUTE)
    replicate = by_hand(mesh_of(dp_replicate=4), machine=slow).seconds
    assert replicate["dp_replicate"] == pytest.approx(2 * whole * 4 * 3 / 4 / 2e9 - COMPUTE)
    far = by_hand(mesh_of(dp_shard=8), machine=slow).seconds["dp_shard"]  # over two nodes of four network cards each
    assert far == pytest.approx(whole * 8 * 7 / 8 / 1e9 - COMPUTE)
