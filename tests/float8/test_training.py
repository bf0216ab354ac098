"""Emulated float8 and MXFP8 train as well as bf16, on one device and on two. Other meshes and checkpoints are in
``tests/integration/test_low_precision.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.low_precision import FAST, RECIPES, run_in
from harness.quick import rows
from titan_core.api import UserError
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job, run_recipe

Runs = Callable[[str], RunRecord]


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The record of a recipe, or of bf16, on one device."""

    def run(recipe: str) -> RunRecord:
        folder = tmp_path_factory.mktemp("one")
        return gloo.run(1, run_in, str(folder), {**FAST, **RECIPES.get(recipe, {})})[0]

    return functools.cache(run)


@pytest.mark.parametrize("recipe", rows(RECIPES, ("tensorwise, float8 all-gather",)))
def test_low_precision_learns_as_bf16_does(one_device: Runs, recipe: str) -> None:
    bf16, float8 = one_device("bf16"), one_device(recipe)
    assert float8.losses != bf16.losses
    assert bf16.losses[-1] < 0.9 * bf16.losses[0]
    assert float8.losses == pytest.approx(bf16.losses, rel=0.02)


@pytest.mark.full
def test_two_ranks_change_nothing_but_rounding(gloo: GlooPool, one_device: Runs, tmp_path: Path) -> None:
    gathered = "tensorwise, float8 all-gather"
    for record in gloo.run(2, run_in, str(tmp_path), {**FAST, **RECIPES[gathered]}):
        assert record.losses == pytest.approx(one_device(gathered).losses, rel=5e-3)


MISTAKES = {
    "both": ({"float8.enable": "true", "mx.enable": "true"}, "mx.enable = true: float8.enable is also true"),
    "gather": (
        {"float8.enable": "true", "float8.recipe_name": "rowwise", "float8.enable_fsdp_float8_all_gather": "true"},
        "float8.enable_fsdp_float8_all_gather = true: needs one scale per weight",
    ),
    "scales": (
        {"float8.enable": "true", "float8.precompute_float8_dynamic_scale_for_fsdp": "true"},
        "has an effect only if weights are gathered in float8; set float8.enable_fsdp_float8_all_gather = true",
    ),
    "filter": (
        {"mx.enable": "true", "mx.filter_fqns": "['auto_filter_small_kn']"},
        "auto_filter_small_kn exists only for float8",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_contradictory_options_are_refused(mistake: str) -> None:
    overrides, message = MISTAKES[mistake]
    with pytest.raises(UserError) as caught:
        make_job("tiny", dict(overrides))
    assert message in str(caught.value)


@pytest.mark.parametrize("section", ["float8", "mx"])
def test_hardware_is_checked_only_when_a_job_starts(section: str) -> None:
    job = make_job("tiny", {f"{section}.enable": "true", "job.device": "cpu"})
    with pytest.raises(UserError, match=rf"{section}.emulate = true to compute the same numbers in software"):
        job.require_hardware()
    make_job("tiny", {f"{section}.enable": "true", f"{section}.emulate": "true"}).require_hardware()


@pytest.mark.parametrize(
    ("filters", "convert_head", "expected"),
    [
        ([], False, {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}),
        ([], True, {"wq", "wk", "wv", "wo", "w1", "w2", "w3", "output"}),
        (["attention"], False, {"w1", "w2", "w3"}),
        (["layers.*.attention.w[kv]", "feed_forward.w2"], False, {"wq", "wo", "w1", "w3"}),
    ],
)
def test_filters(filters: list[str], convert_head: bool, expected: set[str]) -> None:
    from titan_core.api import ModelPart
    from titan_core.model.next_token import NextToken
    from titan_float8.layers import linear_layers

    definition = make_job("tiny").model
    with torch.device("meta"):
        model: Any = definition.build()
    part = ModelPart(model, definition.layout, NextToken())
    names = [name for name, _ in linear_layers(part.named_modules(), part.layout, filters, convert_head, 16)]
    assert {name.rpartition(".")[2] for name in names} == expected
    assert list(linear_layers(part.named_modules(), part.layout, [], False, 4096)) == []


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_compiled_code_rounds_as_eager_code_if_rows_have_scales(recipe: str) -> None:
    from titan_core.loop.world import join_world
    from titan_core.model.build import build_parts

    job = make_job(
        "tiny", {"float8.enable": "true", "float8.emulate": "true", "float8.recipe_name": recipe, "job.device": "cpu"}
    )
    with join_world(job) as world:
        (part,) = build_parts(job, world.mesh, world.device)
    entries = part.slots.get("titan_parallel.compiler_options", {})
    assert all(options == {"emulate_precision_casts": True} for options in entries.values())
    assert len({name.split(".")[1] for name in entries}) == (0 if recipe == "tensorwise" else len(part.blocks()))


@pytest.mark.parametrize("section", ["float8", "mx"])
def test_a_filter_that_matches_no_layer_is_refused(section: str, in_tmp: Path) -> None:
    settings = {f"{section}.enable": "true", f"{section}.emulate": "true", f"{section}.filter_fqns": '["wq", "atention"]'}
    with pytest.raises(
        UserError, match=rf"{section}.filter_fqns: 'atention': matches no linear layer .* use names such as 'layers.0"
    ):
        run_recipe("tiny", settings)
