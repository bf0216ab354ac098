"""Tasks for workers of a Ray cluster, which import them by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from titan_core.api import UserError


def held(folder: str, write: Callable[[int], int], part: int) -> int:
    """Say on which machine the part is, and write it once ``folder/killed`` names another machine, which never goes on."""
    import ray

    machine = ray.get_runtime_context().get_node_id()
    (Path(folder) / f"{part}@{machine}").touch()
    killed = Path(folder) / "killed"
    while not killed.exists() or killed.read_text() == machine:
        time.sleep(0.05)
    return write(part)


def refused(part: int) -> int:
    """Fail as a task does that meets a mistake of the user."""
    raise UserError.one(f"part {part}", "no tokens today", "wait a day")
