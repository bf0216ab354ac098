"""What a pipeline's stage may return."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from harness.small_gpt import Block, changed, definition, layout_of, train_model
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord
from titan_testing.meshes import PP, SCHEDULE


class ViewingBlock(Block):
    """Returns a view, as a block does that ends with an auxiliary loss."""

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().forward(x, documents).view(x.shape)


def train(folder: str, overrides: dict[str, object]) -> RunRecord:
    brief = {"training.steps": 2, "training.global_batch_size": 8, "lr_scheduler.warmup_steps": 1}
    build = changed(lambda model: setattr(model, "blocks", nn.ModuleList(ViewingBlock() for _ in range(4))))
    return train_model(folder, definition(build, layout_of(blocks=4)), {**brief, **overrides})


@pytest.mark.parametrize("schedule", [pytest.param("1F1B", marks=pytest.mark.full), "ZBVZeroBubble"])
def test_a_view(gloo: GlooPool, tmp_path: Path, schedule: str) -> None:
    (one,) = gloo.run(1, train, str(tmp_path), {})
    for record in gloo.run(2, train, str(tmp_path), {PP: 2, SCHEDULE: schedule}):
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
