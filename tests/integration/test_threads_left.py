"""After a job, no thread of its process groups is left: one that still runs while Python exits may abort the process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.gloo_pool import GlooPool
from harness.jobs import TINY, run_recipe
from harness.meshes import CP, DR, PP, TP
from harness.quick import rows
from titan_core.loop.gc_settings import free_job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="lists threads in /proc")


def gloo_threads() -> set[str]:
    free_job()
    tasks = [Path(task.path) for task in os.scandir("/proc/self/task")]
    return {task.name for task in tasks if (task / "comm").read_text().startswith("pt_gloo")}


def threads_left(folder: str, mesh: dict[str, object]) -> int:
    """Return how many threads there are that were not before. Those of an earlier job may end meanwhile."""
    os.chdir(folder)
    before = gloo_threads()
    run_recipe("tiny", {**TINY, "model.args": "{n_heads = 4, n_kv_heads = 2}", "job.device": "cpu", **mesh})
    return len(gloo_threads() - before)


MESHES: dict[str, dict[str, object]] = {"FSDP": {}, "TP": {TP: 2}, "DDP": {DR: 2}, "CP": {CP: 2}, "PP": {PP: 2}}


@pytest.mark.parametrize("mesh", rows(MESHES, ["PP"]))
def test_none_is_left(gloo: GlooPool, tmp_path: Path, mesh: str) -> None:
    assert gloo.run(2, threads_left, str(tmp_path), MESHES[mesh]) == [0, 0]
