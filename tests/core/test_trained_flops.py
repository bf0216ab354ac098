"""Operations of models with frozen parameters, against those that torch counts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.build import build_whole
from titan_testing.jobs import make_job

LENGTH = 64
SIZE: dict[str, str | int] = {"model.args": "{n_layers = 4, dim = 64, n_heads = 4}", "training.seq_len": LENGTH}


def job_of(*freeze: str, **settings: object) -> AssembledJob:
    return make_job("tiny", {**SIZE, **settings, "training.freeze": json.dumps(freeze)}, 1)


def counted(job: AssembledJob) -> float:
    """Return the operations of a token that torch counts, forward and backward."""
    model = build_whole(job)
    assert isinstance(model, nn.Module)
    tokens = torch.zeros(2, LENGTH, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).sum().backward()
    return counter.get_total_flops() / tokens.numel()


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    "freeze",
    [
        ("layers.*",),
        ("tok_embeddings.*",),
        ("tok_embeddings.*", "layers.*", "norm.*"),
        ("tok_embeddings.*", "layers.*"),
        ("tok_embeddings.*", "layers.[01].*"),
        ("layers.[23].*", "norm.*"),
        ("layers.*.feed_forward.*",),
    ],
    ids=["all blocks", "embedding", "all but the output", "all but the head", "beginning", "end", "by kind"],
)
def test_frozen_parameters_have_fewer_operations(freeze: tuple[str, ...], tied: bool) -> None:
    """A tied embedding is frozen with the output layer."""
    more = {"model.args": str(SIZE["model.args"]).replace("}", f", tie_embeddings = {str(tied).lower()}}}")} if tied else {}
    if tied and "norm.*" in freeze and "layers.*" in freeze:
        freeze = ("layers.*",)  # otherwise nothing is trained
    whole, job = job_of(**more), job_of(*freeze, **more)
    assert counted(whole) == pytest.approx(whole.flops_per_token, rel=0.01)
    assert counted(job) == pytest.approx(job.flops_per_token, rel=0.01)
    assert job.flops_per_token < whole.flops_per_token or freeze == ("tok_embeddings.*",)


def test_passes_are_those_of_each_module() -> None:
    trained = job_of("tok_embeddings.*", "layers.[01].*", "layers.3.attention.*").trained_flops
    assert trained is not None
    modules = {
        "layers.1.attention.wq": 1, "layers.2.attention.wq": 3, "layers.3.attention.wq": 2, "layers.3.feed_forward.w1": 3,
        "output": 3,
    }  # fmt: skip
    assert {name: trained.passes(name) for name in modules} == modules
    assert trained.passes("layers.3") == pytest.approx((2 * 4 * 64**2 + 3 * 3 * 64 * 384) / (4 * 64**2 + 3 * 64 * 384))
    assert job_of().trained_flops is None


def test_a_stage_counts_what_it_trains() -> None:
    job = job_of("layers.*")
    other = replace(job, config=job.config.changed({"training.freeze": ["layers.0.*"]}))
    assert other.flops_per_token > job.flops_per_token  # what is kept of one job is not that of another


def test_a_tied_output_is_frozen_under_its_own_name() -> None:
    tied = {"model.args": "{n_layers = 4, dim = 64, n_heads = 4, tie_embeddings = true}"}
    assert job_of("output.*", **tied).flops_per_token == job_of("tok_embeddings.*", **tied).flops_per_token
