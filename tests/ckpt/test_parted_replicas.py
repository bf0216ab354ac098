"""Replicas of the weights that part end a run before they are saved, and soon after a resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from harness.ring import SumOverRing, ring_job
from titan_core.api import UserError
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, run_job

SETTINGS = {
    **TINY,
    "job.device": "cpu",
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.steps": 9,
    "checkpoint.enable": "true",
    "checkpoint.interval": 4,
}


def train(folder: str, unsummed: int, **more: Any) -> str:
    """Train on a ring that sums no gradient in one step; return the error."""
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SumOverRing, "times", {unsummed: 0})
        try:
            run_job(ring_job("batch", reduces=("ring",), overrides={**SETTINGS, **more}))
        except UserError as error:
            return str(error)
    return ""


def test_replicas_that_part_are_not_saved_and_are_found_after_a_resume(gloo: GlooPool, tmp_path: Path) -> None:
    for error in gloo.run(2, train, str(tmp_path), 3, **{"job.dump_folder": "parted"}):
        assert error.startswith("step 4: parameter 'tok_embeddings.weight'")
    assert list(tmp_path.glob("parted/checkpoint/*")) == []
    stopped = {"training.stop_at_step": 5}
    assert gloo.run(2, train, str(tmp_path), 0, **stopped) == ["", ""]
    assert len(list(tmp_path.glob("outputs/*/checkpoint/*"))) == 2
    for error in gloo.run(2, train, str(tmp_path), 7):
        assert error.startswith("step 7: parameter 'tok_embeddings.weight'")
