"""A plugin that records which tokens each step of a job trains on, and slows the job down at a given step.

Each rank writes a file ``trail/ATTEMPT-RANK.jsonl`` in the folder ``$TITAN_CHAOS``: first where the attempt begins, then for
each completed step the digests of the sequences that it trained on, by their row of the global batch.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api import hookimpl

if TYPE_CHECKING:
    from titan_core.api import PendingUpdate, Run, StepReport

api = (1, 0)

FOLDER = "TITAN_CHAOS"
TRAIL, GATE = "trail", "gate"
HOLD_SECONDS = 2.0
"""How long a step beyond the gate is held up. Not until the gate opens: that would be a hang, and a job must be able to stop
on SIGTERM there."""

_descriptor: int | None = None
_rows: dict[int, str] = {}


@hookimpl
def titan_train_start(run: Run) -> None:
    global _descriptor
    if FOLDER in os.environ:
        path = Path(os.environ[FOLDER]) / TRAIL / f"{run.attempt:.6f}-{run.world.rank}.jsonl"
        _descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        _write({"begun": run.step, "world": run.world.size})


@hookimpl
def titan_step_start(step: int) -> None:
    until = time.monotonic() + HOLD_SECONDS
    while step > _gate() and time.monotonic() < until:
        time.sleep(0.01)


@hookimpl
def titan_before_update(update: PendingUpdate) -> None:
    for batch in update.microbatches:
        assert batch.rows is not None
        for row, tokens, targets in zip(batch.rows.tolist(), batch.tokens.cpu(), batch.targets.cpu(), strict=True):
            _rows[row] = hashlib.sha256(tokens.numpy().tobytes() + targets.numpy().tobytes()).hexdigest()[:16]


@hookimpl
def titan_step_end(report: StepReport) -> None:
    _write({"step": report.step, "time": time.time(), "rows": _rows})
    _rows.clear()


def _gate() -> float:
    """Return the last step that is not held up."""
    try:
        return int((Path(os.environ[FOLDER]) / GATE).read_text())
    except (KeyError, FileNotFoundError):
        return float("inf")


def _write(record: dict[str, Any]) -> None:
    """Write a line by one call, so that a process that is killed leaves whole lines."""
    if _descriptor is not None:
        os.write(_descriptor, (json.dumps(record) + "\n").encode())
