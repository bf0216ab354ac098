"""MFU is relative to the device's peak, and marked as an estimate if that peak was measured."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.one_of_many import OneOfMany
from titan_core.api.config.sections import TrainingSection
from titan_core.loop import training
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import format_mfu
from titan_debug import mfu, peak_flops
from titan_debug.peak_flops import IdealTime, ideal_time_per_token, measured_flops
from titan_testing.jobs import TINY, make_job

CPU = torch.device("cpu")


class Clock:
    """A clock on which matmuls take as long as on a busy machine."""

    def __init__(self, flops: float, slowed: list[float]) -> None:
        self.now, self._flops, self._slowed = 0.0, flops, itertools.cycle(slowed)

    def mm(self, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        self.now += 2 * left.shape[0] ** 3 / self._flops * next(self._slowed)
        return out

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """A process that has measured no device, also afterwards."""
    peak_flops._measured.cache_clear()
    yield
    peak_flops._measured.cache_clear()


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("slowed", [[1.0], [9.0, 3.0, 8.0, 5.0, 1.0], [40.0] * 9 + [1.0]], ids=["idle", "busy", "very busy"])
def test_the_peak_is_the_fastest_of_many_short_matmuls(monkeypatch: pytest.MonkeyPatch, slowed: list[float]) -> None:
    clock = Clock(1e11, slowed)
    monkeypatch.setattr(torch, "mm", clock.mm)
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    assert measured_flops(CPU, torch.float32) == pytest.approx(1e11)
    measured = clock.now
    assert measured < 3.0  # it does not measure forever
    assert measured_flops(CPU, torch.float32) == pytest.approx(1e11) and clock.now == measured  # once in a process


@pytest.mark.usefixtures("unmeasured")
def test_a_peak_is_measured_quickly_and_draws_no_random_number() -> None:
    state = torch.get_rng_state()
    started = time.process_time()
    assert measured_flops(CPU, torch.float32) > 1e8
    assert time.process_time() - started < 5.0
    assert torch.equal(torch.get_rng_state(), state)


def test_the_data_sheet_of_a_known_gpu_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    gpu = torch.device("cuda")
    assert ideal_time_per_token(989e12, torch.bfloat16, {}, gpu) == IdealTime(1.0, estimated=False)
    eight = {torch.float8_e4m3fn: 1979e12}
    assert ideal_time_per_token(2968e12, torch.bfloat16, eight, gpu) == IdealTime(2.0, estimated=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "An Unheard-of GPU")
    monkeypatch.setattr(peak_flops, "measured_flops", lambda device, dtype: 1e12)
    assert ideal_time_per_token(1e12, torch.bfloat16, {}, gpu) == IdealTime(1.0, estimated=True)
    assert ideal_time_per_token(3e12, torch.float32, {torch.bfloat16: 1e12}, CPU) == IdealTime(3.0, estimated=True)


def test_an_estimate_and_an_impossible_figure_are_marked() -> None:
    assert format_mfu(0.412, estimated=False) == "41.2%"
    assert format_mfu(0.412, estimated=True) == "~41.2%"
    assert format_mfu(1.07, estimated=True) == "~107.0% (peak too low)"
    assert format_mfu(1.07, estimated=False) == "107.0% (peak too low)"


@pytest.mark.parametrize("seconds", [1e-9, 1.0], ids=["plausible", "impossible"])
def test_a_run_says_that_its_mfu_is_an_estimate(
    in_tmp: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
) -> None:
    """In its records and on the console. An impossible MFU is logged once."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(mfu, "ideal_time_per_token", lambda *arguments: IdealTime(seconds, estimated=True))
    training.train(make_job("tiny", TINY))
    run = RunLog.read(in_tmp / "outputs/tiny")
    assert [record["mfu_estimated"] for record in run.steps] == [True] * len(run.steps)
    impossible = seconds == 1.0
    assert all((record["mfu"] > 1.0) == impossible for record in run.steps)
    shown = [line for line in capsys.readouterr().out.splitlines() if "| mfu " in line]
    assert len(shown) == len(run.steps) and all("| mfu ~" in line for line in shown)
    assert all(("(peak too low)" in line) == impossible for line in shown)
    assert caplog.text.count("so the estimated peak of this device is too low: it was probably measured") == impossible


def test_the_peak_is_that_of_all_ranks() -> None:
    observer = mfu.Mfu(SimpleNamespace(job=None))  # type: ignore[arg-type]
    world: Any = OneOfMany({"pp": 2, "tp": 2}, at={"pp": 1})
    object.__setattr__(world, "rank", 2)
    observer.titan_train_start(SimpleNamespace(parts=[], world=world))  # type: ignore[arg-type]
    observer._ideal = IdealTime(0.001, estimated=False)
    record: Any = {"tokens_per_second": 1000.0}
    assert observer.titan_figures(record) == {"mfu": 0.25, "mfu_estimated": False}


@pytest.mark.parametrize(("at", "counted"), [({}, True), ({"pp": 1}, True), ({"tp": 1}, False), ({"dp_shard": 1}, False)])
def test_one_rank_of_each_pipeline_stage_counts_the_flops_of_its_layers(at: dict[str, int], counted: bool) -> None:
    part: Any = SimpleNamespace(entries=lambda slot: {"w1": (torch.float8_e4m3fn, 2.0), "w2": (torch.float8_e4m3fn, 3.0)})
    found = mfu.flops_by_type([part], OneOfMany({"pp": 2, "tp": 2, "dp_shard": 2}, at=at))
    assert found == ({torch.float8_e4m3fn: 5.0} if counted else {})


def test_modules_with_frozen_matrices_count_the_products_that_are_left() -> None:
    part: Any = SimpleNamespace(entries=lambda slot: {"w1": (torch.float8_e4m3fn, 6.0), "w2": (torch.float8_e4m3fn, 3.0)})
    found = mfu.flops_by_type([part], OneOfMany({}, at={}), {"w1": 2.0, "w2": 1.0}.__getitem__)
    assert found == {torch.float8_e4m3fn: 5.0}


def test_matmuls_count_by_their_type() -> None:
    """With two thirds of the FLOPs in float8 at twice the peak, the ideal time falls from 6 s to 4 s."""
    peaks = {torch.bfloat16: 1e12, torch.float8_e4m3fn: 2e12}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak_flops, "peak_flops", lambda device, dtype: peaks[dtype])
        ideal = functools.partial(peak_flops.ideal_time_per_token, 6e12, torch.bfloat16)
        assert ideal({}, CPU) == peak_flops.IdealTime(6.0, estimated=False)
        assert ideal({torch.float8_e4m3fn: 4e12}, CPU) == peak_flops.IdealTime(2.0 + 2.0, estimated=False)


@pytest.mark.parametrize(
    ("device", "capability", "settings", "message"),
    [
        ("cuda", (9, 0), {}, "fp32 matmuls run without tensor cores (in bfloat16, this GPU reaches 989 TFLOP/s)"),
        (
            "cuda",
            (9, 0),
            {"training.float32_matmul_precision": "high"},
            "fp32 matmuls run in TF32, at half the speed of bfloat16 (in bfloat16, this GPU reaches 989 TFLOP/s)",
        ),
        ("cuda", (9, 0), {"training.mixed_precision_param": "bfloat16"}, None),
        ("cuda", (7, 5), {}, None),
        ("cpu", (9, 0), {}, None),
    ],
)
def test_computing_in_fp32_on_a_gpu_is_loud(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    settings: dict[str, object],
    message: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    training = (
        make_job("tiny")
        .config.section(TrainingSection)
        .model_copy(update={key.partition(".")[2]: value for key, value in settings.items()})
    )
    found = mfu.slow_precision(torch.device(device), training)
    assert found is None if message is None else found is not None and found.startswith(message)
