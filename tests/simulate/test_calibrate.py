"""``titan calibrate``: what it measures, how it fits that, and what it writes."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from harness.fake_cuda import FakeCuda
from harness.refusals import refused
from titan_testing.gloo_pool import GlooPool

pytest.importorskip("titan_simulate")
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_simulate.calibrate import collectives, compute
from titan_simulate.calibrate.calibrate import median_of
from titan_simulate.calibrate.fit import fit_link, known_machine, machine_values
from titan_simulate.calibrate.result import (
    AttentionPoint,
    Calibration,
    CollectivePoint,
    Compute,
    FreshMemory,
    MatmulPoint,
    Measured,
)
from titan_simulate.calibrate.timing import CudaTimer, HostTimer, Timing
from titan_simulate.calibrate.write import noisy, toml_of, write_machine

DAY = datetime(2026, 11, 22, tzinfo=UTC)


def points(achievable: float, half_depth: float) -> tuple[MatmulPoint, ...]:
    """Matmuls of a device that the formula describes exactly."""
    shapes = [(4096, 4096, k) for k in (64, 256, 1024, 4096)] + [(8192, 8192, 8192)]
    return tuple(
        MatmulPoint(m, n, k, 2 * m * n * k / (achievable * 1e12) * (1 + half_depth / k), 0.01) for m, n, k in shapes
    )


def link(
    ranks: int = 4, start: float = 20e-6, latency: float = 5e-6, bandwidth: float = 50e9
) -> tuple[CollectivePoint, ...]:
    """Collectives over links that the formula describes exactly."""
    found = []
    for kind, size in itertools.product(("all_gather", "reduce_scatter", "all_reduce", "send"), (1024, 2**28)):
        point = CollectivePoint(kind, ranks, size, 1.0, 0.0)
        seconds = start + point.hops * latency + point.bus_bytes / bandwidth
        found.append(dataclasses.replace(point, seconds=seconds))
    return tuple(found)


def made(device: str = "a CPU", is_cpu: bool = True, bandwidth: float = 40.0) -> Calibration:
    """A calibration as it might be measured."""

    def measured(value: float, unit: str) -> Measured:
        return Measured("something", value, unit, 0.02)

    rates = Compute(
        matmuls={"fp32": points(0.1, 4.0), "bf16": points(0.4, 64.0)},
        attention=tuple(  # 0.1 and 0.08 over long sequences, half of that over 256 positions
            AttentionPoint(size, measured(0.1 * size / (size + 256), ""), measured(0.08 * size / (size + 256), ""))
            for size in (256, 2048)
        ),
        bandwidth=measured(bandwidth, "GB/s"),
        mix=measured(bandwidth / 2, "GB/s"),
        operator=measured(4.0, "µs"),
        host_bandwidth=measured(15.0, "GB/s"),
        kernel=None if is_cpu else measured(2.0, "µs"),
        copy=None if is_cpu else measured(24.0, "GB/s"),
        pointwise=measured(4.0, "G/s") if is_cpu else None,
        fresh=FreshMemory(64, measured(2.0, "GB/s")) if is_cpu else None,
    )
    return Calibration(
        device, is_cpu, 24.0, 1 if is_cpu else 132, None if is_cpu else "9.0", 1, 4, 4, rates, link(), (), {"torch": "2.15"}
    )


def test_the_rates_of_an_exact_device_are_found() -> None:
    values = machine_values(made())
    assert values["matmul"]["fp32"]["achievable_tflops"] == pytest.approx(0.1, rel=1e-3)
    assert values["matmul"]["fp32"]["half_depth"] == 4.0
    assert values["matmul"]["bf16"]["half_depth"] == 64.0
    assert values["attention"] == {"forward_tflops": 0.1, "backward_tflops": 0.08, "half_positions": 256.0}
    memory = values["memory"]
    assert (memory["bandwidth_gb_s"], memory["efficiency"], memory["kernel_us"]) == (40.0, 0.5, 0.0)
    assert (memory["functions_g_s"], memory["fresh_mib"], memory["fresh_gb_s"]) == (4.0, 64, 2.0)


@pytest.mark.parametrize(("ranks", "start", "latency"), [(2, 0.0, 9e-6), (4, 20e-6, 5e-6), (8, 30e-6, 0.0)])
def test_the_links_of_an_exact_device_are_found(ranks: int, start: float, latency: float) -> None:
    began, found = fit_link(link(ranks, start, latency))
    assert began == pytest.approx(start * 1e6, abs=0.05)
    assert found == {"bandwidth_gb_s": pytest.approx(50.0, rel=1e-3), "latency_us": pytest.approx(latency * 1e6, abs=0.05)}


def test_the_file_passes_the_reader_and_says_where_it_is_from(tmp_path: Path) -> None:
    text = toml_of(made(), "titan calibrate --out here.toml", DAY)
    machine = write_machine(text, tmp_path / "here.toml")
    assert machine.name == "a CPU" and machine.host.computes
    assert machine.links.network == machine.links.node and "Not measured: links across nodes" in text
    for said in ("titan calibrate --out here.toml", "2026-11-22", "torch 2.15", "4 rank(s)", "spread 2%"):
        assert said in text
    assert [path.name for path in tmp_path.iterdir()] == ["here.toml"]


def test_a_known_gpu_keeps_the_peaks_of_its_data_sheet(tmp_path: Path) -> None:
    known = known_machine("NVIDIA H100 80GB HBM3")
    assert known is not None and known[0] == "h100"
    machine = write_machine(toml_of(made("NVIDIA H100 80GB HBM3", is_cpu=False), "", DAY), tmp_path / "gpu.toml")
    assert machine.matmul["bf16"].peak_tflops == known[1].matmul["bf16"].peak_tflops
    assert machine.memory.bandwidth_gb_s == 3352.0 and machine.memory.efficiency == pytest.approx(20 / 3352, rel=1e-3)
    assert machine.links.network == known[1].links.network
    assert not machine.host.computes


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"memory\.bandwidth_gb_s"):
        machine_values(made(bandwidth=0.0))
    with pytest.raises(UserError, match="fp32 matmuls: the clock measured 0"):
        Timing.of([0.0, 1.0, 1.0], "fp32 matmuls")


def test_one_gpu_alone_that_is_unknown_has_no_links() -> None:
    with pytest.raises(UserError, match="--nproc-per-node"):
        machine_values(dataclasses.replace(made("an unknown GPU", is_cpu=False), node=()))


def test_rounds_that_vary_are_reported() -> None:
    found = made()
    assert noisy(found) == []
    varied = dataclasses.replace(found.compute, operator=Measured("operator", 4.0, "µs", 0.6))
    assert noisy(dataclasses.replace(found, compute=varied)) == ["operator"]


def test_the_median_counts_and_a_slow_round_does_not() -> None:
    timing = Timing.of([1.0, 1.0, 1.1, 1.0, 9.0], "something")
    assert timing == Timing(1.0, pytest.approx(0.1))


def test_one_slow_rank_does_not_decide() -> None:
    slow = dataclasses.replace(made().compute, matmuls={"fp32": points(0.01, 4.0)})
    usual = made().compute
    assert median_of([usual, slow, usual]) is usual


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measurements that take no time, in this thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(compute, "CPU_MATMULS", ((64, 64, 64), (128, 64, 64)))
    monkeypatch.setattr(compute, "CPU_ATTENTION", ((1, 1, 64, 16), (1, 1, 128, 16)))
    monkeypatch.setattr(compute, "FRESH_MIB", (1, 64))
    yield
    torch.set_num_threads(threads)


def test_this_cpu_is_measured(small: None) -> None:
    timer = HostTimer(time.thread_time, rounds=3, least_seconds=1e-3)  # other load does not count
    found = compute.measure_compute(torch.device("cpu"), timer, timer)
    values = machine_values(dataclasses.replace(made(), compute=found))
    assert values["matmul"].keys() == {"fp32", "bf16"}
    assert 0.001 < values["matmul"]["fp32"]["achievable_tflops"] < 100
    assert 0.1 < values["memory"]["bandwidth_gb_s"] < 10_000
    assert 0.1 < values["host"]["operator_us"] < 10_000


def measured_over_gloo() -> list[CollectivePoint]:
    from titan_simulate.calibrate.ranks import groups_of_nodes, joined

    collectives.SECONDS["cpu"], collectives.LARGE["cpu"] = 1e-4, 2**20
    with joined("cpu") as device:
        group, across, per_node = groups_of_nodes()
        assert group is not None and across is None and per_node == 2
        return collectives.measure_links(group, device, rounds=2)


def test_ranks_measure_the_links_between_them(gloo: GlooPool) -> None:
    first, second = gloo.run(2, measured_over_gloo)
    assert first == second  # the slowest rank counts
    assert {point.kind for point in first} == {"all_gather", "reduce_scatter", "all_reduce", "send"}
    start, found = fit_link(first)
    assert start >= 0 and found["bandwidth_gb_s"] > 0 and found["latency_us"] >= 0


def measured_on_fake_cuda() -> dict[str, object]:
    import torch.distributed as dist

    setattr(torch.cuda.Event, "elapsed_time", lambda start, end: 1.0)  # noqa: B010 (mypy: a method)
    device = torch.device("cuda", 0)
    timer = CudaTimer(device, rounds=2, least_seconds=1e-3)
    found = compute.measure_compute(device, timer, HostTimer(rounds=2, least_seconds=1e-4))
    group = dist.group.WORLD
    assert group is not None
    over = collectives.measure_links(group, device, rounds=2)
    values = machine_values(
        dataclasses.replace(made("NVIDIA H100 80GB HBM3", is_cpu=False), compute=found, node=tuple(over))
    )
    return dict(values)


def test_the_measurements_of_a_gpu_run(fake_cuda: FakeCuda) -> None:
    values = fake_cuda.run(measured_on_fake_cuda, world_size=8)
    assert list(values["matmul"]) == ["bf16", "tf32", "fp32", "fp8"]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--out", "machine.txt"], "machine.txt"),
        (["--out", "old.toml"], "exists"),
        (["--out", "nowhere/new.toml"], "nowhere"),
        (["--nproc-per-node", "0"], "--nproc-per-node"),
        (["--device", "tpu"], "--device"),
        (["--device", "cuda"], "no CUDA device"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("old.toml").write_text("mine")
    refused(["calibrate", *arguments], capsys, named)
    assert Path("old.toml").read_text() == "mine"


def test_a_launcher_and_processes_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["calibrate", "--nproc-per-node", "2"]) == 2
    assert "launcher" in capsys.readouterr().err
