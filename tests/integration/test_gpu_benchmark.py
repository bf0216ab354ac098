"""``python -m benchmarks.gpu`` works before it first meets a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import gpu_tests
from benchmarks.gpu.carry import missing, read_installed, requirements
from benchmarks.gpu.cases import BASELINE, CASES, Case, chosen, plan
from benchmarks.gpu.child import job_of, measure
from benchmarks.gpu.gpu_tests import PATHS, run_tests
from benchmarks.gpu.meter import Measurement, Meter
from benchmarks.gpu.predict import predicted
from benchmarks.gpu.processes import reason, run_limited
from benchmarks.gpu.report import table
from harness.fake_cuda import FakeCuda
from titan_core.api import UserError

ROOT = Path(__file__).parents[2]


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_the_benchmark_runs_at_toy_size_without_a_gpu(tmp_path: Path) -> None:
    out = ["--toy", "--device", "cpu", "--out", str(tmp_path), "--workers", "0", "--tests", "random_words"]
    found = benchmark(*out, "--only", "titan, eager", "bare loop, eager")
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["tests"]["passed"], report["tests"]["failed"], report["tests"]["problem"]) == (1, {}, "")
    assert [row["name"] for row in report["rows"]] == ["titan, eager", "bare loop, eager"]
    for row in report["rows"]:
        result = row["result"]
        assert result["tokens_per_second"] == pytest.approx(64 / result["step_seconds"])
        assert result["first_step_seconds"] > result["step_seconds"]
        assert 0.05 < result["peak_gib"] < 50 and result["host_seconds"] > 0
        # Both train on bytes; the loss begins near that of 272 equally likely tokens.
        assert 4.5 < result["losses"][0] < 7.5 and result["losses"][1] != result["losses"][0]
    (line,) = (tmp_path / "tests.jsonl").read_text().splitlines()
    assert json.loads(line)["outcome"] == "passed"
    text = (tmp_path / "report.md").read_text()
    assert "| titan, eager | " in text and "The model is a toy" in text
    assert report["machine"]["packages"]["torch"] in text and report["machine"]["commit"] in text


@pytest.mark.full
def test_a_configuration_that_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    """A toy step takes longer than the limit, and the other configuration still has its turn."""
    out = ["--toy", "--device", "cpu", "--out", str(tmp_path), "--no-tests", "--case-seconds", "0.5"]
    found = benchmark(*out, "--only", "titan, eager", "bare loop, eager")
    assert found.returncode == 1, found.stderr
    assert found.stdout.count("| stopped at its limit of 0 s |") == 2
    assert (tmp_path / "cases.log").read_text().count("=====") == 2


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    wrong = benchmark("--out", str(tmp_path), "--device", "cpu", "--only", "no such thing")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: no configuration for cpu contains 'no such thing'; --list shows all\n"


def test_every_configuration_of_titan_is_a_valid_job_for_a_gpu(tmp_path: Path) -> None:
    of_all = plan("cuda", toy=False, layers=8, seq_len=8192, batch=1)
    sizes = set()
    for case in CASES:
        job = job_of(case, of_all, str(tmp_path))
        sizes.add((job.model.num_params, job.model.layout.vocab_size, job.batch.tokens_per_step))
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert sizes == {(8 * block + 2 * 128_256 * 4096 + 4096, 128_256, 8192)}


def measured(name: str) -> Measurement:
    case = next(case for case in CASES if case.name == name)
    return measure(case, plan("cuda", toy=True, layers=0, seq_len=0, batch=1), time.time())


def test_the_bare_loop_runs_on_fake_cuda_tensors(fake_cuda: FakeCuda) -> None:
    """Their values and times mean nothing; the data sheet of the simulated device applies."""
    found = fake_cuda.run(measured, "bare loop, eager")
    assert found.tokens_per_second > 0 and found.mfu is not None and found.mfu > 0
    assert found.reserved_gib is not None


def test_the_rows_are_named_apart_and_in_order_of_importance() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert [case.kind for case in CASES[:4]] == ["bare", "titan", "titan", "titan"]
    assert CASES[0].name == BASELINE
    assert {case.kind for case in chosen(None, "cuda")} == {"titan", "bare", "torchtitan"}
    assert [case.name for case in chosen(["titan, eager"], "cpu")] == ["titan, eager"]  # the name itself, not its beginning
    assert all("float8" in case.name for case in chosen(["float8"], "cuda"))


def test_a_process_that_exceeds_its_limit_ends_with_all_that_it_started() -> None:
    started = time.monotonic()
    status, _ = run_limited(["sh", "-c", "sleep 600 & wait"], limit=0.5)
    # The pipe of its output closes only when its child has ended too.
    assert status is None and time.monotonic() - started < 60


def test_the_reason_of_a_failure_is_its_last_error() -> None:
    log = (
        "Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nWARNING: leaked\n"
    )
    assert reason(log) == "torch.OutOfMemoryError: CUDA out of memory. Tried"
    assert reason("titan: error: model.args: bad\n") == "titan: error: model.args: bad"
    assert reason("\n") == "printed nothing"


def row(name: str, speed: float | None, failure: str = "") -> dict[str, Any]:
    result = None
    if speed is not None:
        result = {
            "tokens_per_second": speed, "mfu": 0.5, "peak_gib": 40.0, "reserved_gib": 41.0, "step_seconds": 0.2,
            "host_seconds": 0.05, "first_step_seconds": 30.0,
        }  # fmt: skip
    return {"name": name, "result": result, "failure": failure}


def test_the_table_compares_with_the_bare_loop() -> None:
    lines = table([row(BASELINE, 40_000), row("titan, compiled", 42_000), row("titan, eager", None, "out | of memory")])
    assert lines[2] == f"| {BASELINE} | 40,000 | 1.000 | 50.0% | 40.00 | 41.00 | 200.0 | 50.0 | 30.0 |"
    assert lines[3].startswith("| titan, compiled | 42,000 | 1.050 |")
    assert lines[4].startswith("| titan, eager | out / of memory |")
    assert len({line.count("|") for line in lines}) == 1


def test_the_table_compares_with_predictions() -> None:
    predictions = {"titan, compiled": {"step_seconds": 0.25, "peak_gib": 32.0, "fits": True}}
    head, _, first, second = table([row(BASELINE, 40_000), row("titan, compiled", 42_000)], predictions)
    assert head.endswith("| step / predicted | peak / predicted |")
    assert first.endswith("| - | - |") and second.endswith("| 0.800 | 1.250 |")


@pytest.mark.full
def test_a_row_is_predicted_and_found_again(tmp_path: Path) -> None:
    found = benchmark("--toy", "--out", str(tmp_path), "--predict", "h100", "--only", "titan, eager", "bare loop, eager")
    assert found.returncode == 0 and found.stdout.startswith("titan, eager: "), found.stderr
    read = predicted(plan("cuda", toy=True, layers=0, seq_len=0, batch=1), tmp_path)
    assert read is not None and read["rows"].keys() == {"titan, eager"} and read["rows"]["titan, eager"]["fits"]
    assert predicted(plan("cuda", toy=False, layers=8, seq_len=64, batch=1), tmp_path) is None
    wrong = benchmark("--toy", "--out", str(tmp_path), "--predict", "no-such-machine", "--only", "titan, eager")
    assert wrong.returncode == 1 and "no-such-machine" in wrong.stdout


def test_tests_that_are_stopped_leave_their_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text("""
import pytest

pytestmark = pytest.mark.gpu

def test_passes(): pass
def test_fails(): raise ValueError("wrong\\nmore")
def test_skips(): pytest.skip("no NCCL")
def test_stops():
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
""")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\naddopts = -p no:randomly\n")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # this test's own worker
    monkeypatch.setattr(gpu_tests, "PATHS", (str(tests), f"--rootdir={tmp_path}", f"-c{tmp_path}/pytest.ini"))
    found = run_tests(tmp_path, "cpu", 60, 0, None)
    assert (found.passed, found.failed) == (1, {"test_some.py::test_fails": "ValueError: wrong"})
    assert list(found.skipped) == ["test_some.py::test_skips"] and "no NCCL" in found.skipped["test_some.py::test_skips"]
    assert found.problem.startswith("pytest ended with status -9")


def test_steps_and_probes_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter = Meter(torch.device("cpu"), started=time.time() - 5, warmup=1, steps=2, probes=3)
    for step, seconds in enumerate((9.0, 1.0, 3.0, 0.5, 0.25, 7.0, 9.0), start=1):
        meter.begin(step)
        now += seconds
        meter.end(step)
    found = meter.result(tokens_per_step=100, flops_per_token=1e6, peak_flops=1e9)
    assert (found.step_seconds, found.host_seconds, found.tokens_per_second) == (2.0, 0.5, 50.0)
    assert found.mfu == pytest.approx(0.05)
    assert 5 <= found.first_step_seconds < 60


def test_all_tests_marked_gpu_are_in_the_files_that_it_runs() -> None:
    marked = [file for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text(encoding="utf-8")]
    inside = [file for file in marked if any((ROOT / path) in (file, *file.parents) for path in PATHS)]
    assert [file for file in marked if file not in inside and file != Path(__file__)] == []
    assert len(inside) > 5


def test_only_what_a_machine_lacks_is_carried(tmp_path: Path) -> None:
    file = tmp_path / "installed.txt"
    file.write_text("torch==2.11.0\nnumpy==2.5.2\nPyYAML==6.0\nrich\nlocal @ file:///x\n-e git+x\n")
    installed = read_installed(file)
    assert installed == {"torch": "2.11.0", "numpy": "2.5.2", "pyyaml": "6.0", "rich": None, "local": None}
    carried = missing(["torch>=2.11", "numpy>=1.26", "rich>=13", "pydantic>=2.9"], installed, "3.12")
    assert {"pydantic", "pydantic-core", "typing-extensions", "annotated-types"} <= set(carried)
    assert carried.keys().isdisjoint({"torch", "numpy", "rich", "titan-core"})
    assert missing(["numpy>=99"], {**installed, "numpy": None}, "3.12") == {}  # of unknown version
    with pytest.raises(SystemExit, match=r"needs torch>=2.11, and has 2.7.0: torch is not carried"):
        missing(["torch>=2.11"], {"torch": "2.7.0"}, "3.12")


def test_the_requirements_are_those_of_all_packages_and_of_the_tests() -> None:
    names = {text.split(">")[0] for text in requirements()}
    assert {"pydantic", "torchao", "tiktoken", "nvidia-ml-py", "pytest", "hypothesis"} <= names
    assert not any(name.startswith("titan") for name in names)


def test_an_impossible_configuration_is_refused_before_it_needs_a_device(tmp_path: Path) -> None:
    impossible = Case("x", "titan", {"activation_checkpoint.mode": "everything"})
    with pytest.raises(UserError, match=r"activation_checkpoint\.mode"):
        job_of(impossible, plan("cuda", toy=False, layers=8, seq_len=8192, batch=1), str(tmp_path))
