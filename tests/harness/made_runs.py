"""Writes directories of fictitious runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0
"""Start time of these runs, in seconds since the epoch. A step takes one second."""


def record(step: int, **more: Any) -> dict[str, Any]:
    """Return the record of a logged step."""
    return {
        "step": step, "loss": 2 + 4 * math.exp(-step / 50), "loss_max": 2 + 4 * math.exp(-step / 50), "grad_norm": 1 / step,
        "lr": 1e-3, "tokens_per_second": 4096.0, "tokens_per_second_per_device": 2048.0, "tflops": 1.5, "mfu": 0.41,
        "memory_active_gib": 2.0, "memory_reserved_gib": 4.0, "memory_peak_gib": 3.0, "memory_retries": 0,
        "step_seconds": 1.0, "data_seconds": 0.05, "forward_backward_seconds": 0.8, "optimizer_seconds": 0.1,
        "checkpoint_seconds": 0.02, "tokens_seen": 4096 * step, "epoch": 0, "corrupt_records": 0, "time": BEGAN + step,
        **more,
    }  # fmt: skip


def validation(step: int, loss: float | None) -> dict[str, Any]:
    """Return the record of a validation."""
    return {
        "step": step, "validation_loss": loss, "validation_tokens": 8192, "validation_seconds": 0.5, "time": BEGAN + step
    }  # fmt: skip


def start(step: int = 0, at: float = 0.0, steps: int = 100, **more: Any) -> dict[str, Any]:
    """Return a start event, ``at`` seconds after the run began."""
    processes = [{"host": "elsewhere", "pid": 1}]
    begun = {"event": "start", "time": BEGAN + at, "step": step, "steps": steps, "world_size": 2, "mesh": {"dp_shard": 2}}
    return {**begun, "processes": processes, **more}


def end(step: int, at: float, **more: Any) -> dict[str, Any]:
    """Return an end event, ``at`` seconds after the run began."""
    ending = {"event": "end", "time": BEGAN + at, "step": step, "completed": False, "failed": False, "preempted": False}
    return {**ending, "reason": "all steps are done", **more}


def write_run(
    folder: Path,
    steps: int = 100,
    events: Sequence[Mapping[str, Any]] | None = None,
    config: str = '[model]\nname = "llama3"\nflavor = "debug"\n',
    more: Callable[[int], Mapping[str, Any]] = lambda step: {},
    validations: Sequence[Mapping[str, Any]] = (),
    core: str = "0.1.0",
) -> Path:
    """Write a run that has logged each step; return its folder.

    Args:
        events: the events (default: it started and finished).
        more: further metrics of a step.
        core: version of titan-core.
    """
    folder.mkdir(parents=True)
    lines = [{**record(step), **more(step)} for step in range(1, steps + 1)]
    write_lines(folder / "metrics.jsonl", [*lines, *validations])
    whole = [start(steps=steps), end(steps, at=steps + 1, completed=True)]
    write_lines(folder / "events.jsonl", whole if events is None else events)
    (folder / "config.toml").write_text(config)
    (folder / "plugins.json").write_text(json.dumps([{"name": "core", "distribution": "titan-core", "version": core}]))
    return folder


def write_lines(file: Path, lines: Sequence[Mapping[str, Any]], mode: str = "w") -> None:
    """Write JSON lines; ``mode`` "a" appends."""
    with file.open(mode) as opened:
        opened.writelines(json.dumps(line) + "\n" for line in lines)


CLOSING = "</script><b>owned"
"""Text of an event that must not end the script element that contains it."""


def eventful_loss(step: int) -> float | None:
    return None if step == 50 else 6 - step / 50 + step % 3 / 10


def write_eventful(folder: Path) -> Path:
    """Write a run that was killed, restarted and finished, with validations, findings, two datasets and one NaN loss."""
    events = [
        start(),
        {"event": "checkpoint", "time": BEGAN + 40, "step": 40, "path": "checkpoint/step-40"},
        {"event": "finding", "time": BEGAN + 45, "step": 45, "kind": "loss spike", "message": CLOSING},
        start(40, at=60),
        end(100, at=121, completed=True),
    ]
    shares = {"tokens_seen/web": 3.0, "tokens_seen/code": 1.0}

    def more(step: int) -> dict[str, Any]:
        loss = eventful_loss(step)
        # The second attempt began 20 s after the checkpoint. The metrics of the first one after the checkpoint are gone.
        moment = BEGAN + (step if step <= 40 else step + 20)
        highest = None if loss is None else loss + 0.2
        return {**{k: v * step for k, v in shares.items()}, "loss": loss, "loss_max": highest, "time": moment}

    return write_run(
        folder, events=events, more=more, validations=[validation(30, 5.5), validation(100, 4.25)], core="9.9.9",
        config='[model]\nname = "llama3"\nflavor = "8B"\n[optimizer]\nlr = 0.5\n[job]\ndump_folder = "elsewhere"\n',
    )  # fmt: skip
