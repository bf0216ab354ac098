"""Runs the tests marked ``gpu`` and reads their results."""

from __future__ import annotations

import os
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.processes import ROOT, reason, run_limited

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
    """Why there are no results; empty if there are."""


def run_tests(folder: Path, device: str, limit: float, workers: int, only: str | None) -> GpuTests:
    """Run the tests, at most ``limit`` seconds.

    Args:
        only: an expression for pytest's ``-k``.
    """
    report = folder / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-n", str(workers), "--durations=10", "-rfE", *PATHS,
               f"--junitxml={report}", "-p", "no:cacheprovider"]  # fmt: skip
    if only is not None:
        command += ["-k", only]
    started = time.time()
    variables = {"TITAN_GPU_TESTS_DEVICE": "cpu"} if device == "cpu" else {}
    status, output = run_limited(
        command, limit, {**variables, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}, ROOT
    )
    (folder / "tests.log").write_text(output, encoding="utf-8")
    found = GpuTests(time.time() - started)
    if status is None:
        found.problem = f"stopped at the limit of {limit:.0f} s; tests.log has what ran"
    elif status not in (0, 1) or not report.exists():
        found.problem = f"pytest ended with status {status}: {reason(output)}"
    else:
        _read(report, found)
    return found


def _read(report: Path, found: GpuTests) -> None:
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        failure = next((child for child in case if child.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if failure is not None:
            found.failed[name] = (failure.get("message") or "").strip().partition("\n")[0][:200]
        elif skip is not None:
            found.skipped[name] = (skip.get("message") or "").strip()
        else:
            found.passed += 1
