"""A division that fails with an error of torch names the module, its parameters and their rules."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import small_gpt
from harness.odd_gpts import OWN, OWN_RULES, own_parameters
from harness.small_gpt import LAYOUT, SmallGPT
from titan_core.api import Column, Replicate, Row, UserError
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_job

BRIEF: dict[str, object] = {
    "training.steps": 1, "training.global_batch_size": 4, "lr_scheduler.warmup_steps": 1,
    "parallelism.tensor_parallel_degree": 2,
}  # fmt: skip
RULES = LAYOUT.rules
SWAPPED = {**RULES, "blocks.*.mlp.up.*": Row(), "blocks.*.mlp.down.*": Column()}
CASES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "rows and columns swapped": (
        SmallGPT,
        replace(LAYOUT, rules=SWAPPED),
        (
            "rules have Row() for 'blocks.0.mlp.up.weight', but its layer takes the whole input of region 'blocks.0.mlp'",
            "give it Column(), and Row() to the layer that takes its results",
        ),
    ),
    "a whole layer": (
        SmallGPT,
        replace(LAYOUT, rules={**RULES, "blocks.*.attention.q.*": Replicate()}),
        (
            "module 'blocks.0.attention.out', called with a tensor [2, 16, 24]",
            "whole in its region 'blocks.0.attention': 'blocks.0.attention.q.weight', 'blocks.0.attention.q.bias'",
        ),
    ),
    "a whole parameter": (
        own_parameters,
        replace(OWN, rules={**OWN_RULES, "blocks.*.mlp.up": Replicate()}),
        (
            "module 'blocks.0.mlp', called with",
            "'blocks.0.mlp.up' [24, 2, 24], rule Replicate()",
            "'blocks.0.mlp.down' [2, 24, 24], rule Shard(dim=1, norm=False), of which a rank has [2, 12, 24]",
            "a parameter that meets divided features needs Shard(dim)",
        ),
    ),
}


def refusal(folder: str, name: str) -> str:
    """Return why the first step is refused."""
    os.chdir(folder)
    build, layout, _ = CASES[name]
    try:
        run_job(small_gpt.job_of(small_gpt.definition(build, layout), BRIEF, 2))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CASES)
def test_a_share_that_cannot_be_computed_with_is_named(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    first, second = gloo.run(2, refusal, str(tmp_path), name)
    assert first == second
    for part in CASES[name][2]:
        assert part in first, first
    assert "mat1 and mat2" not in first and "size of tensor" not in first
