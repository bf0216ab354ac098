"""Processes with a time limit: one for each configuration, and one for the tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, Plan, as_json

ROOT = Path(__file__).parents[2]
LOG = "cases.log"
"""What the processes of all configurations print, in the folder of the report."""

_MODULES = {"titan": "benchmarks.gpu.child", "bare": "benchmarks.gpu.child", "torchtitan": "benchmarks.gpu.torchtitan_child"}
_ERROR = re.compile(r"^(titan: error: |\S*(Error|Exception|Exit)\b)")


@dataclass
class Outcome:
    """How a process ended."""

    seconds: float
    failure: str = ""
    """One line; empty if it succeeded."""
    result: Any = None
    """What it measured (:class:`~benchmarks.gpu.meter.Measurement` as JSON); ``None`` if it failed."""


def run_limited(
    command: Sequence[str], limit: float, environment: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> tuple[int | None, str]:
    """Run ``command`` and return its exit status and its output. After ``limit`` seconds it is ended with all processes that
    it has started, and the status is ``None``."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, output


def run_case(case: Case, plan: Plan, folder: Path, limit: float, caches: Path) -> Outcome:
    """Measure ``case`` in a process of its own. A failure is part of the outcome.

    Args:
        folder: where to append to :data:`LOG` what the process prints.
        limit: seconds until it is ended.
        caches: folder of the compiler's caches. Each kind has its own, so the first compiled case of each kind finds nothing
            compiled, and the others of its kind some of it.
    """
    file = folder / "case.json"
    file.unlink(missing_ok=True)
    started = time.time()
    command = [sys.executable, "-m", _MODULES[case.kind], json.dumps(as_json(case, plan)), str(file), repr(started)]
    environment = {
        # Less memory is lost to fragments; the same for all kinds.
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / case.kind / "inductor"),
        "TRITON_CACHE_DIR": str(caches / case.kind / "triton"),
    }
    status, output = run_limited(command, limit, environment)
    seconds = time.time() - started
    with (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(f"===== {case.name}\n{output}\n")
    outcome = Outcome(seconds)
    if status is None:
        outcome.failure = f"stopped at its limit of {limit:.0f} s"
    elif status != 0 or not file.exists():
        outcome.failure = f"{reason(output)} (exit status {status}; see {LOG})"
    else:
        outcome.result = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
    return outcome


def reason(output: str) -> str:
    """Return the line that says why a process failed: the last error, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    found = (errors or lines or ["printed nothing"])[-1]
    return found if len(found) <= 160 else f"{found[:157]}..."
