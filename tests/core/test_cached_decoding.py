"""A mixer that loses a part of its state is refused by name before the first step: it would generate other tokens."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from harness.odd_gpts import between
from harness.own_mixers import with_means
from harness.small_gpt import DIM, Block, changed, definition, job_of
from titan_core.api import UserError, current_decoding
from titan_core.model.build import build_whole
from titan_core.model.layout_trial import try_model


class Mean(nn.Module):
    """The mean of a position and all earlier ones, which keeps their sum and number."""

    how = "right"

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        decoding = current_decoding()
        if decoding is None or self.how == "no state":
            return self.gain * x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        if self.how == "one position" and x.shape[1] == 1:
            raise RuntimeError("no single position")
        kept = decoding.state(self)
        total, count = kept.get("sum", torch.zeros_like(x[:, :1])), int(kept.get("count", torch.tensor(0)))
        sums = total + x.cumsum(1)
        counts = count + torch.arange(1, x.shape[1] + 1)[:, None]
        kept["sum"] = x.cumsum(1)[:, -1:] if self.how == "the last sum" else sums[:, -1:]
        kept["count"] = torch.tensor(x.shape[1] if self.how == "the last count" else int(counts[-1, 0]))
        if self.how == "the first pass":
            kept.update({"sum": total, "count": torch.tensor(count)} if count else {})
        return self.gain * sums / counts


class MeanBlock(Block):
    shifts = False

    def __init__(self) -> None:
        super().__init__()
        self.mean = Mean()

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        before = x + torch.nn.functional.pad(x, (0, 0, 1, -1)) if self.shifts else x
        return super().forward(x + self.mean(before), documents)


HOW = {
    "right": "",
    "no state": "",
    "the last sum": "mixer 'blocks.0.mean' returns something else",
    "the last count": "mixer 'blocks.0.mean' returns something else",
    "the first pass": "mixer 'blocks.0.mean' returns something else",
    "one position": "positions 14 to 14 alone raise RuntimeError.*no single position",
    "a token shift": "the code before mixer 'blocks.0.mean' reads earlier positions",
}


@pytest.mark.parametrize("how", HOW)
def test_a_state_that_is_lost_is_refused_by_the_name_of_its_mixer(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mean, "how", how)
    monkeypatch.setattr(MeanBlock, "shifts", how == "a token shift")
    build = changed(lambda model: setattr(model, "blocks", nn.ModuleList(MeanBlock() for _ in model.blocks)))
    job = job_of(definition(build, with_means("right")))
    mesh: Any = None
    if not HOW[how]:
        try_model(build_whole(job), job, mesh, torch.device("cpu"))
        return
    with pytest.raises(UserError, match=re.escape("layout of model 'tiny': its mixers keep") + f".*{HOW[how]}"):
        try_model(build_whole(job), job, mesh, torch.device("cpu"))


def test_code_that_reads_earlier_positions_beside_attention_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Only generation would be wrong, for which the model may not be trained."""
    shifted = between(embedded=lambda h: h + nn.functional.pad(h, (0, 0, 1, -1)))
    job, mesh = job_of(definition(shifted)), cast(Any, None)
    try_model(build_whole(job), job, mesh, torch.device("cpu"))
    assert "the code before mixer 'blocks.0.attention.mixer' reads earlier positions" in caplog.text
