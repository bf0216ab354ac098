"""Runs the tests marked ``gpu`` and reads their results, of a run that is stopped too."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import ROOT, reason, run_limited
from benchmarks.gpu.result_lines import FILE

PATHS = ("tests/gpu", "tests/debug/test_profiling.py")
"""Files with tests marked ``gpu``. Others are not collected, which would take longer than the tests."""


@dataclass
class GpuTests:
    """The results of the tests."""

    seconds: float
    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Name of each failed test, with the first line of its message."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name of each skipped test, with the reason."""
    problem: str = ""
    """Why results are missing; empty if none is."""


def run_tests(folder: Path, device: str, limit: float, workers: int, only: str | None) -> GpuTests:
    """Run the tests, at most ``limit`` seconds.

    Args:
        only: an expression for pytest's ``-k``.
    """
    lines = folder / "tests.jsonl"
    lines.unlink(missing_ok=True)
    # A file's tests share a process, and files begin in this order.
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-n", str(workers), "--dist", "loadfile", "--durations=10",
               "-rfE", *PATHS, "-p", "benchmarks.gpu.result_lines", "-p", "no:cacheprovider"]  # fmt: skip
    if only is not None:
        command += ["-k", only]
    started = time.time()
    variables = {"TITAN_GPU_TESTS_DEVICE": "cpu"} if device == "cpu" else {}
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    status, output = run_limited(command, limit, {**variables, "OMP_NUM_THREADS": threads, FILE: str(lines)}, ROOT)
    (folder / "tests.log").write_text(output, encoding="utf-8")
    found = GpuTests(time.time() - started)
    if status is None:
        found.problem = f"stopped at the limit of {limit:.0f} s; tests.log has what ran"
    elif status not in (0, 1):
        found.problem = f"pytest ended with status {status}: {reason(output)}"
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else ():
        _add(json.loads(line), found)
    return found


def _add(result: dict[str, Any], found: GpuTests) -> None:
    name = result["test"].rpartition("/")[2]
    if result["outcome"] == "passed":
        found.passed += 1
    else:
        (found.failed if result["outcome"] == "failed" else found.skipped)[name] = result["reason"]
