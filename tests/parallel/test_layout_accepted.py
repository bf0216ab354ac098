"""Correct layouts, and models that can be divided, are not refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import small_gpt
from harness.model_trials import CP, DOCUMENTS, DP, MESHES, NO_SP, ONE, PP, TP, job_on, require
from harness.odd_gpts import (
    APART,
    Convolution,
    PositionsApart,
    SkipConnections,
    between,
    mixed,
    mixed_of,
    tied_in_blocks,
    with_shifted_norm,
)  # fmt: skip
from harness.small_gpt import LAYOUT
from titan_core.api import Dropout, ModelLayout, Normal
from titan_testing.jobs import make_job


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_a_model_without_mistakes_passes(mesh: dict[str, object]) -> None:
    require(job_on(mesh))
    require(job_on(mesh, mixed(lambda: Dropout(0.3))))
    require(job_on(mesh, mixed_of(lambda x: x * (torch.rand([]) >= 0.0))))  # a draw without effect


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("mesh", "build", "layout"),
    [
        (DP, PositionsApart, APART),
        (DP, mixed(Convolution), LAYOUT),
        (PP, mixed(Convolution), LAYOUT),
        (DP, SkipConnections, LAYOUT),
        (TP, between(embedded=lambda h: h * 3.0), LAYOUT),
        (CP, between(embedded=lambda h: h * 3.0, logits=torch.tanh), LAYOUT),
        ({**TP, "parallelism.disable_loss_parallel": "true"}, between(logits=lambda x: x.log_softmax(-1)), LAYOUT),
        (NO_SP, with_shifted_norm, LAYOUT),
    ],
)  # fmt: skip
def test_a_model_that_can_be_divided_passes(
    mesh: dict[str, object], build: Callable[[], object], layout: ModelLayout
) -> None:
    require(job_on(mesh, build, replace(layout, parameters={"*": Normal(0.02)})))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_parameters_tied_within_a_block_pass(mesh: dict[str, object]) -> None:
    layout = replace(LAYOUT, tied={f"blocks.{block}.norms.1.weight": f"blocks.{block}.norms.0.weight" for block in range(2)})
    job = job_on(mesh, tied_in_blocks, layout)
    for transform in job.transforms:
        assert transform.check is None or not list(transform.check.load()(transform.context(job)))
    require(job)


@pytest.mark.quick_rows(4)
@pytest.mark.parametrize(
    ("mesh", "tied"),
    [
        pytest.param(mesh, tied, id=f"{name}-{'tied' if tied else 'untied'}")
        for tied in (False, True)
        for name, mesh in MESHES.items()
    ],
)
def test_a_decoder_passes(mesh: dict[str, object], tied: bool) -> None:
    overrides = {**mesh, "model.args.tie_embeddings": str(tied).lower(), "training.local_batch_size": 2}
    require(make_job("tiny", overrides, 1 if mesh in (ONE, DOCUMENTS) else 2))


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_the_example_model_passes(mesh: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[2] / "examples" / "titan-model-tinygpt" / "src"
    monkeypatch.syspath_prepend(str(example))
    from titan_model_tinygpt.config import TinyGPTArgs  # type: ignore[import-not-found]
    from titan_model_tinygpt.layout import define  # type: ignore[import-not-found]

    require(small_gpt.job_of(define(TinyGPTArgs()), mesh, 1 if mesh in (ONE, DOCUMENTS) else 2))
