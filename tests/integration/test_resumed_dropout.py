"""After a run resumes, dropout draws the same masks as if the run had not stopped, on any mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.gloo_pool import GlooPool
from harness.masks import train_masked
from harness.meshes import TP


@pytest.mark.full
def test_a_resumed_run_draws_as_if_it_had_not_stopped(gloo: GlooPool, tmp_path: Path) -> None:
    saved = {"checkpoint.enable": "true", "checkpoint.interval": 2, "job.dump_folder": "run"}
    ((one, expected),) = gloo.run(1, train_masked, str(tmp_path), saved)
    later = {place: mask for place, mask in expected.items() if place[1] > 2}
    for ranks, mesh in ((1, {}), (2, {TP: 2})):  # the same mesh and another one
        load = {**saved, "checkpoint.load_step": 2, **mesh}
        (record, masks), *_ = gloo.run(ranks, train_masked, str(tmp_path), load)
        assert masks.keys() == later.keys()
        assert all(torch.equal(masks[place][mask >= 0], later[place][mask >= 0]) for place, mask in masks.items())
        if ranks == 1:
            assert record.losses == one.losses[2:]
            assert all(torch.equal(record.final[name], tensor) for name, tensor in one.final.items())
        else:
            assert record.losses == pytest.approx(one.losses[2:], rel=1e-6)
