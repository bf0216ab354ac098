"""What a pipeline's stage may return."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor, nn

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, run_job
from harness.meshes import PP, SCHEDULE
from harness.small_gpt import LAYOUT, Block, SmallGPT, definition, job_of

BLOCKS = 4


class ViewingBlock(Block):
    """Returns a view, as a block does that ends with an auxiliary loss."""

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(x, documents).view(x.shape)


class Viewing(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ViewingBlock() for _ in range(BLOCKS))


def train(folder: str, overrides: dict[str, object]) -> RunRecord:
    os.chdir(folder)
    brief = {"training.steps": 2, "training.global_batch_size": 8, "lr_scheduler.warmup_steps": 1}
    model = definition(Viewing, replace(LAYOUT, num_blocks=BLOCKS))
    return run_job(job_of(model, {**brief, **overrides}, int(os.environ["WORLD_SIZE"])))


@pytest.mark.parametrize("schedule", [pytest.param("1F1B", marks=pytest.mark.full), "ZBVZeroBubble"])
def test_a_view(gloo: GlooPool, tmp_path: Path, schedule: str) -> None:
    (one,) = gloo.run(1, train, str(tmp_path), {})
    for record in gloo.run(2, train, str(tmp_path), {PP: 2, SCHEDULE: schedule}):
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
