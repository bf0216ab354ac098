"""Estimates the rows before a GPU measures them. No figure of a measurement goes into an estimate."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, Plan
from benchmarks.gpu.machine import commit
from benchmarks.gpu.processes import reason

FILE = "predictions.json"


def predict(cases: Sequence[Case], plan: Plan, machine: str, folder: Path) -> int:
    """Write the estimate of each row of Titan for ``machine`` to ``folder``; return 1 if one failed.

    The bare loop and TorchTitan have no description that ``titan estimate`` reads; they do the work of a row of Titan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {}
    made = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "commit": commit(), "device": machine}
    failed = False
    for case in cases:
        if case.kind != "titan":
            continue
        # The imitation computes on fake tensors, whatever the device that will measure.
        overrides = replace(plan, device="cuda").overrides(case) | {"job.device": "auto"}
        arguments = [f"--{key}={text}" for key, text in overrides.items()]
        command = [sys.executable, "-m", "titan_core", "estimate", plan.recipe, "--device", machine, "--json", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            failed = True
            print(f"{case.name}: {reason(done.stderr)}", flush=True)
            continue
        found = json.loads(done.stdout)
        # As the meter counts: without the context, and what the allocator holds beyond tensors.
        row = {"step_seconds": found["step_seconds"], "peak_gib": found["allocated_gib"], "fits": found["fits"]}
        rows[case.name] = row
        print(f"{case.name}: {1000 * row['step_seconds']:.1f} ms a step, {row['peak_gib']:.2f} GiB", flush=True)
        contents = {**made, "plan": asdict(plan), "rows": rows}
        (folder / FILE).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return int(failed)


def predicted(plan: Plan, folder: Path) -> dict[str, Any] | None:
    """Return the predictions in ``folder``, if there are any for this plan."""
    if not (folder / FILE).exists():
        return None
    found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return found if found["plan"] == asdict(plan) else None
