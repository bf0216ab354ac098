"""What observes a run, on a GPU: the guard against NaN, traces, the Flight Recorder, MFU and `titan doctor`."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.on_device import BF16, train_on
from harness.planting import Plant, findings
from titan_core.api import HealthContext, hookimpl
from titan_core.loop.finite_guard import NonFiniteError
from titan_core.plugins.registry import Components
from titan_core.toolkit.json_lines import read_lines
from titan_debug.doctor import software
from titan_debug.peak_flops import measured_flops, peak_flops
from titan_debug.torch_private import flight_recorder_entries

pytestmark = pytest.mark.gpu

RUN: dict[str, object] = {"job.dump_folder": "run", "metrics.log_freq": 1}


def test_a_nan_is_located(device: torch.device, in_tmp: Path) -> None:
    with pytest.raises(NonFiniteError, match="step 3: the loss is nan"):
        train_on(device, RUN, observers=(Plant(3, "layers.1.feed_forward"),))
    assert findings(in_tmp) == ["step 3: the first output that is not finite is that of layers.1.feed_forward on rank 0"]


def test_steps_with_nan_are_skipped(device: torch.device, in_tmp: Path) -> None:
    skip = {**RUN, "training.on_nan": "skip", "training.steps": 6}
    record = train_on(device, skip, observers=(Plant(2, "layers.1", False, 4),))
    assert record.skipped == [2, 3]
    assert [loss == loss for loss in record.losses] == [True, False, False, True, True, True]
    assert all(bool(tensor.isfinite().all()) for tensor in record.final.values())


def test_observers_change_nothing(device: torch.device, in_tmp: Path) -> None:
    exact = {"training.deterministic": "true"}
    watched = {
        **exact,
        **RUN,
        "numerics.statistics_freq": 1,
        "profiling.enable_profiling": "true",
        "profiling.profile_freq": 2,
        "profiling.profiler_warmup": 1,
    }
    plain = train_on(device, {**exact, "metrics.log_freq": 100})
    assert train_on(device, watched).losses == plain.losses


def test_a_trace_has_the_kernels_of_its_step(device: torch.device, in_tmp: Path) -> None:
    tracing = {"profiling.enable_profiling": "true", "profiling.profile_freq": 3, "profiling.profiler_warmup": 1}
    train_on(device, {**RUN, **tracing})
    events = json.loads(gzip.decompress(Path("run/debug/traces/step-3/rank-0.json.gz").read_bytes()))["traceEvents"]
    kind = "kernel" if device.type == "cuda" else "cpu_op"
    assert sum(event.get("cat") == kind for event in events) > 50
    command = [sys.executable, "-m", "titan_core", "trace", "summary", "run"]
    summary = subprocess.run(command, capture_output=True, text=True, check=False)
    assert summary.returncode == 0, summary.stderr


class Reduces:
    """Reduces a tensor over all ranks in each step, and reads what Flight Recorder holds after the last."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.names = device, set()  # type: ignore[var-annotated]

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        dist.all_reduce(torch.ones(16, device=self._device))
        self.names = {entry["profiling_name"] for entry in flight_recorder_entries()}


def test_flight_recorder_records_the_devices_collectives(device: torch.device, in_tmp: Path) -> None:
    observer = Reduces(device)
    train_on(device, RUN, observers=(observer,))
    assert f"{'nccl' if device.type == 'cuda' else 'gloo'}:all_reduce" in observer.names


def test_mfu_is_relative_to_the_data_sheet(cuda: torch.device, in_tmp: Path) -> None:
    name = torch.cuda.get_device_name(cuda)
    published = {"H100 80GB": 989e12, "H100 SXM": 989e12, "H200": 989e12, "A100": 312e12}
    expected = next((peak for part, peak in published.items() if part in name), None)
    if expected is None:
        # The expected figure must come from a data sheet: one from Titan's own table would prove nothing.
        pytest.skip(f"compares Titan's peak with the data sheet, and the table above has none for {name}")
    assert peak_flops(cuda, torch.bfloat16) == expected
    # A product of 8192 x 8192 matrices reaches about 80 % of the figure of a data sheet, or less if other tests use the GPU.
    assert 0.01 * expected < measured_flops(cuda, torch.bfloat16) < 1.05 * expected
    train_on(cuda, {**RUN, **BF16})
    last = read_lines(Path("run/metrics.jsonl"))[-1]
    assert 0 < last["mfu"] < 1 and not last.get("mfu_estimated")


def test_the_doctor_reports_the_gpu(cuda: torch.device, in_tmp: Path) -> None:
    command = [sys.executable, "-m", "titan_core", "doctor", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout, found.stderr
    checks = {(check["subject"], check["health"]): check["detail"] for check in json.loads(found.stdout)["checks"]}
    assert torch.cuda.get_device_name(cuda) in checks["GPU 0", "ok"]
    assert ("NVIDIA driver", "ok") in checks


def test_the_doctor_computes_on_the_device(device: torch.device, in_tmp: Path) -> None:
    found = {result.subject: result.detail for result in software.compute(HealthContext(Components([]), in_tmp, ""))}
    assert found[f"matmul on {'cuda:0' if device.type == 'cuda' else 'cpu'}"] == "works"
    assert found[f"torch.compile for {device.type}"] == "works"
