"""The time of a step on a CPU, by hand: operators follow each other, and some collectives run beside them."""

from __future__ import annotations

import pytest

pytest.importorskip("titan_simulate")
from titan_simulate.estimate.on_host import run_on_host
from titan_simulate.estimate.timeline import simulate_streams
from titan_simulate.estimate.work import Data, Kind, Work
from titan_simulate.hardware.machine import Machine

MACHINE = Machine.model_validate(
    {
        "name": "a CPU",
        "memory_gib": 16.0,
        "matmul": {
            kind: {"peak_tflops": 0.1, "achievable_tflops": 0.1, "tile_rows": 1, "tile_columns": 1, "half_depth": 0.0}
            for kind in ("fp32", "bf16")
        },
        "attention": {"forward_tflops": 0.05, "backward_tflops": 0.05, "half_positions": 256.0},
        "memory": {
            "bandwidth_gb_s": 50.0, "efficiency": 1.0, "kernel_us": 0.0, "functions_g_s": 2.0, "fresh_mib": 32,
            "fresh_gb_s": 2.0,
        },
        "host": {"computes": True, "operator_us": 10.0, "optimizer_gb_s": 25.0},
        "links": {
            "node": {"bandwidth_gb_s": 1.0, "latency_us": 100.0}, "network": {"bandwidth_gb_s": 1.0, "latency_us": 100.0},
            "start_us": 0.0, "multiprocessors": 0,
        },
    }
)  # fmt: skip
MB = 10**6


def pointwise(read: int, written: int, number: int = 1, name: str = "aten::add", phase: str = "forward") -> Work:
    """An operator that reads storage 0 and writes the storage ``number``."""
    return Work(Kind.POINTWISE, name, phase, "", "7", (), (Data(0, read),), (Data(number, written),))


def seconds(*trace: Work) -> float:
    return simulate_streams(trace, MACHINE).seconds


def test_an_operator_takes_its_issue_and_its_traffic() -> None:
    assert seconds(pointwise(5 * MB, 5 * MB)) == pytest.approx(10e-6 + 200e-6)


def test_operators_follow_each_other_whatever_their_streams() -> None:
    one = pointwise(5 * MB, 5 * MB)
    other = Work(Kind.POINTWISE, "aten::mul", "forward", "", "8", (), (Data(0, 5 * MB),), (Data(2, 5 * MB),))
    assert seconds(one, other) == pytest.approx(2 * 210e-6)


def test_an_exponential_function_takes_longer_than_its_traffic() -> None:
    assert seconds(pointwise(8 * MB, 8 * MB, name="aten::silu")) == pytest.approx(10e-6 + 1e-3)


def test_the_optimizer_moves_its_state_at_its_own_rate() -> None:
    assert seconds(pointwise(5 * MB, 5 * MB, phase="optimizer")) == pytest.approx(10e-6 + 400e-6)


def test_only_large_new_results_are_cleared_by_the_system() -> None:
    size = 40 * 2**20
    first, again = pointwise(0, size), pointwise(0, size)
    cleared, moved = size / 2e9, size / 50e9
    assert seconds(first) == pytest.approx(10e-6 + moved + cleared)
    assert seconds(first, again) == pytest.approx(2 * (10e-6 + moved) + cleared)  # the storage exists the second time


@pytest.mark.parametrize(("name", "passes"), [("attention", 1.0), ("attention_backward", 2.5)])
def test_attention_over_short_sequences_is_slower(name: str, passes: float) -> None:
    elements = 8 * 256 * 64  # heads, positions, width
    flops = int(passes * 2 * elements * 256)
    work = Work(
        Kind.ATTENTION, name, "forward", "", "7", (), (Data(0, 4 * elements),), (Data(1, 4 * elements),), flops=flops
    )
    assert seconds(work) == pytest.approx(10e-6 + 2 * flops / 0.05e12)


def collective(name: str) -> Work:
    return Work(Kind.COLLECTIVE, name, "forward", "", "beside", (), ranks=(0, 1), group="g", bytes=2 * MB)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 100 µs of latency, and half of 2 MB at 1 GB/s
        ("c10d::_allgather_base_", 10e-6 + 1.1e-3 + 1.01e-3),
        ("_c10d_functional::all_gather_into_tensor", 10e-6 + 1.1e-3),
    ],
)
def test_a_functional_collective_runs_beside_what_follows(name: str, expected: float) -> None:
    computes = pointwise(25 * MB, 25 * MB)
    waits = Work(Kind.WAIT, "_c10d_functional::wait_tensor", "forward", "", "7", (0,))
    intervals, kinds = run_on_host([collective(name), computes, waits], MACHINE)
    assert intervals[-1].end == pytest.approx(expected)
    assert kinds[Kind.COLLECTIVE] == pytest.approx(1.1e-3)
