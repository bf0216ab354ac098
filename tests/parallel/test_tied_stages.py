"""Parameters that are tied across pipeline stages. ``test_equivalence.py`` compares their training with one device."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness import small_gpt
from harness.small_gpt import DIM, LAYOUT, VOCAB, SmallGPT
from titan_core.api import ModelLayout, Replicate, UserError
from titan_parallel.tied_stages import ties_within
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_job

THREE = replace(LAYOUT, tied={"norm.weight": "embedding.weight", "output.weight": "embedding.weight"})


@pytest.mark.parametrize(
    ("stage", "tied", "copies"),
    [
        (("embedding", "blocks.0", "blocks.1", "norm", "output"), THREE.tied, {}),
        (("embedding", "blocks.0"), {}, {}),
        (("blocks.1", "norm", "output"), {"output.weight": "norm.weight"}, {"norm.weight": "embedding.weight"}),
        (("norm",), {}, {"norm.weight": "embedding.weight"}),
        (("embedding", "output"), {"output.weight": "embedding.weight"}, {}),
    ],
)
def test_a_stage_has_one_copy_of_a_parameter_of_another(
    stage: tuple[str, ...], tied: dict[str, str], copies: dict[str, str]
) -> None:
    assert ties_within(THREE, stage) == (tied, copies)


class Lookup(nn.Module):
    """An embedding that tensor parallelism does not recognise, so that it is not divided."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class TiedLookup(SmallGPT):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.token = Lookup()  # type: ignore[assignment]
        self.output.weight = self.embedding.token.weight


def refused(folder: str, layout: ModelLayout, overrides: dict[str, object]) -> str:
    os.chdir(folder)
    job = small_gpt.job_of(small_gpt.definition(TiedLookup, layout), overrides, int(os.environ["WORLD_SIZE"]))
    with pytest.raises(UserError) as error:
        run_job(job)
    return str(error.value)


@pytest.mark.full
def test_copies_are_divided_like_their_original(gloo: GlooPool, tmp_path: Path) -> None:
    layout = replace(
        LAYOUT, tied={"output.weight": "embedding.token.weight"}, rules={**LAYOUT.rules, "embedding.*": Replicate()}
    )
    mesh: dict[str, object] = {"parallelism.tensor_parallel_degree": 2, "parallelism.pipeline_parallel_degree": 2}
    for message in gloo.run(4, refused, str(tmp_path), layout, {**mesh, "training.global_batch_size": 4}):
        assert message.startswith(
            "the model's layout: ties 'output.weight' to 'embedding.token.weight', but a rank's shares"
        )
        assert "[144, 24]" in message
        assert "[288, 24]" in message
