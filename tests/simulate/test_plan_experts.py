"""The time and memory of experts: rows that ranks exchange, empty tiles, and waits for their counts."""

from __future__ import annotations

import pytest

from harness.planned import BLOCKS, DIM, EXPERTS, HIDDEN, SIZES, guess_of, mesh_of, workload
from harness.planned_by_hand import TEN, by_hand
from titan_core.api import MeshPlan
from titan_simulate.hardware.read import read_machine
from titan_simulate.plan.arithmetic import Arithmetic
from titan_simulate.plan.unit_kinds import UnitKinds
from titan_simulate.plan.workload import Guess


def test_experts_exchange_positions_over_their_view() -> None:
    assert "ep" not in guess_of(mesh_of(dp_shard=8)).seconds
    near, far = guess_of(mesh_of(dp_shard=32, ep=8)), guess_of(mesh_of(dp_shard=32, ep=16))
    assert 0 < near.seconds["ep"] < far.seconds["ep"]


# The machine of round figures has 4 ranks a node: 100 GB/s within it, and 10 GB/s to others.
def _of_experts(mesh: MeshPlan, imbalance: float = 1.0, **changes: object) -> Guess:
    return Arithmetic(SIZES, TEN, imbalance).guess(workload(mesh, **changes))


@pytest.mark.parametrize(("ep", "share"), [(2, 1 / 2 / 100e9), (4, 3 / 4 / 100e9), (8, 4 / 8 / 10e9)])
def test_rows_are_sent_to_their_experts_and_back_over_the_links_between(ep: int, share: float) -> None:
    """Four times in a step, of 4 microbatches; of what leaves a rank, each card sends what leaves the node."""
    routed = SIZES.units["blocks.3"].routed * BLOCKS * 8192 * 2
    assert _of_experts(mesh_of(dp_shard=8, ep=ep)).seconds["ep"] == pytest.approx(routed * 4 * 4 * share)
    recomputed = _of_experts(mesh_of(dp_shard=8, ep=ep), kept=0.0, recomputed=1.0).seconds["ep"]
    assert recomputed == pytest.approx(routed * 6 * 4 * share)


def test_the_busiest_rank_computes_and_receives_more_rows_if_ranks_divide_the_experts() -> None:
    even, busy = (_of_experts(mesh_of(dp_shard=8, ep=4), imbalance) for imbalance in (1.0, 1.5))
    assert busy.seconds["ep"] == pytest.approx(1.5 * even.seconds["ep"])
    unit = SIZES.units["blocks.3"]
    rows = sum(matrix.copies * matrix.inner * matrix.outer for matrix in unit.matrices if matrix.experts)
    more = 0.5 * 6 * rows * 8192 * BLOCKS * 4 / 10e12
    assert busy.seconds["compute"] - even.seconds["compute"] == pytest.approx(more, rel=0.01)
    fixed = [_of_experts(mesh_of(dp_shard=8, ep=4), one, exchanged_rows=4.0).seconds["ep"] for one in (1.0, 1.5)]
    assert fixed == pytest.approx([4 * even.seconds["ep"]] * 2)
    whole = [_of_experts(mesh_of(dp_shard=8), imbalance) for imbalance in (1.0, 1.5)]
    assert whole[0] == whole[1]


def test_buffers_of_a_fixed_size_hold_empty_places() -> None:
    even, padded = (_of_experts(mesh_of(dp_shard=8, ep=4), exchanged_rows=rows) for rows in (None, 4.0))
    features = 2 * (DIM + HIDDEN) * SIZES.units["blocks.3"].routed / DIM
    assert padded.memory["activations"] - even.memory["activations"] == pytest.approx(
        3 * features * 8192 * 2 * BLOCKS, rel=1e-6
    )


def test_the_host_waits_in_each_forward_pass_of_a_block_with_experts() -> None:
    each = TEN.memory.kernel_us * 1e-6
    for again in (0.0, 1.0):
        with_wait, none = (_of_experts(mesh_of(dp_shard=8), recomputed=again, host_waits=waits) for waits in (1.0, 0.0))
        passes = BLOCKS * 4 * (1 + again)
        assert with_wait.seconds["host"] - none.seconds["host"] == pytest.approx(passes * each)
    assert by_hand(mesh_of(), host_waits=1.0).seconds["host"] == 0.0


def test_experts_of_few_rows_compute_empty_tiles_and_are_read_nevertheless() -> None:
    """So dividing them pays, where few positions are on a rank."""

    def compute(tokens: int, ep: int) -> float:
        return _of_experts(mesh_of(dp_shard=8, ep=ep), seq_len=tokens).seconds["compute"]

    assert compute(8192, 1) == pytest.approx(compute(8192, 8), rel=0.05)
    assert compute(64, 1) > 2 * compute(64, 8)
    # 16 rows of each expert, whose weights take longer to read twice and to write than to multiply.
    kinds = UnitKinds(SIZES, read_machine("h100"))
    (up,) = (one for one in SIZES.units["blocks.3"].matrices if one.experts and one.inner == HIDDEN)
    rates, memory = kinds.machine.matmul_of("bf16"), kinds.machine.memory
    moving = 3 * EXPERTS * DIM * HIDDEN * 2 / (memory.bandwidth_gb_s * 1e9 * memory.efficiency)
    assert kinds._expert_seconds(up, rates, 1.0, 1, 2) == pytest.approx(moving)
