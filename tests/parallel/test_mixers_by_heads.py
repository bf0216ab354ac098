"""Mixers of a model's own kind are divided by heads, if their layout says where the heads are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import small_gpt
from harness.own_mixers import FADING, FADING_IN_PART, Fading, with_fading
from harness.quick import rows
from titan_core.api import JobContext, Mixer, ModelLayout, UserError
from titan_parallel.config import ContextParallelKeys
from titan_parallel.context_parallel_check import check
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job, run_job
from titan_testing.meshes import CP, HEADS, TP, require_equal

BRIEF: dict[str, object] = {
    "training.steps": 3,
    "training.global_batch_size": 8,
    "lr_scheduler.warmup_steps": 1,
    "optimizer.eps": 1e-5,
}
DOCUMENTS: dict[str, object] = {
    "training.dataset": "letters",
    "training.dataset_path": "/".join(str(5 + 7 * number % 13) for number in range(60)),
    "data.document_mask": "true",
}
CASES: dict[str, tuple[int, ModelLayout, dict[str, object]]] = {
    "CP 2": (2, FADING, {CP: 2, HEADS: 2}),
    "CP 2, documents": (2, FADING, {CP: 2, HEADS: 2, **DOCUMENTS}),
    "CP 4, selective": (4, FADING, {CP: 4, HEADS: 4, "activation_checkpoint.mode": "selective"}),
    "TP x CP": (4, FADING, {TP: 2, CP: 2, HEADS: 2}),
    "CP 4, 2 by heads, and its own rule": (4, FADING_IN_PART, {CP: 4, HEADS: 2}),
    "CP 2, compiled": (2, FADING, {CP: 2, HEADS: 2, "compile.enable": "true", "compile.backend": "aot_eager"}),
}


def train(folder: str, layout: ModelLayout, overrides: dict[str, object]) -> RunRecord:
    return small_gpt.train_model(folder, small_gpt.definition(with_fading, layout), overrides)


@pytest.mark.parametrize("case", rows(CASES, ("CP 2, documents",)))
def test_training_is_that_of_one_device(gloo: GlooPool, tmp_path: Path, case: str) -> None:
    ranks, layout, overrides = CASES[case]
    settings = {**BRIEF, **{key: value for key, value in overrides.items() if key in DOCUMENTS}}
    (one,) = gloo.run(1, train, str(tmp_path), layout, settings)
    require_equal(gloo.run(ranks, train, str(tmp_path), layout, {**BRIEF, **overrides}), one)


def problems(mixer: Mixer, **degrees: int) -> list[str]:
    """Return why context parallelism refuses a model with ``mixer``."""
    job = make_job("tiny", {CP: degrees["cp"], HEADS: degrees["heads"]}, degrees["cp"])
    layout = replace(job.model.layout, mixers={**job.model.layout.mixers, "other.scan": mixer})
    changed = replace(job, model=replace(job.model, layout=layout))
    return list(map(str, check(JobContext(section=ContextParallelKeys(), job=changed))))


def test_a_mixer_without_a_rule_needs_all_ranks_to_divide_its_heads() -> None:
    mixer = Mixer(kind="fading", heads=8, heads_dim=2)
    assert problems(mixer, cp=2, heads=2) == []
    (problem,) = problems(mixer, cp=4, heads=2)
    assert problem.endswith(f"set {HEADS} = 4, or set {CP} = 1 and {HEADS} = 1")
    (problem,) = problems(replace(mixer, heads=6), cp=4, heads=4)
    assert "must divide the 6 heads of 'other.scan'" in problem and problem.endswith(f"set {HEADS} = 2 or 1")
    assert problems(Mixer(kind="fading", heads=6), cp=4, heads=4)[0].endswith(f"set {CP} = 1 and {HEADS} = 1")


@pytest.mark.parametrize("wrong", [{"heads": None}, {"heads_dim": 0}, {"heads_dim": 1}])
def test_heads_are_in_a_dimension_of_their_own(wrong: dict[str, int | None]) -> None:
    with pytest.raises(ValueError, match="needs heads in that dimension"):
        Mixer(**{"kind": "fading", "heads": 8, "heads_dim": 2, **wrong})  # type: ignore[arg-type]


class WithScale(Fading):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def parameter_in_mixer() -> nn.Module:
    model = with_fading()
    model.blocks[0].attention.mixer = WithScale()
    return model


def shared_features() -> nn.Module:
    """Return a model that calls the mixer with keys that all heads share."""
    model = with_fading()
    model.blocks[0].attention.mixer.register_forward_pre_hook(
        lambda module, given: (*given[:3], given[3].mean(-1, keepdim=True), *given[4:])
    )
    return model


def refused(folder: str, model: Callable[[], nn.Module]) -> str:
    os.chdir(folder)
    job = small_gpt.job_of(small_gpt.definition(model, FADING), {**BRIEF, CP: 2, HEADS: 2}, 2)
    try:
        run_job(job)
    except UserError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            parameter_in_mixer,
            "'blocks.0.attention.mixer' of the model: its layout gives it heads_dim, .* but it has 'scale'; pass",
        ),
        (shared_features, r"tensor \[2, 8, 1\] has no heads in dimension 2, so ranks cannot divide the heads"),
    ],
)
def test_what_cannot_be_divided_by_heads_is_refused(
    gloo: GlooPool, tmp_path: Path, model: Callable[[], nn.Module], why: str
) -> None:
    import re

    for message in gloo.run(2, refused, str(tmp_path), model):
        assert re.search(why, message), message
