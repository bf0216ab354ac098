"""Which layers are converted, and with which options: without training."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8.float8_linear import Float8Linear

from titan_core.api import Column, ModelLayout, ModelPart, ModuleCall, Problem, Row, UserError
from titan_core.model.next_token import NextToken
from titan_float8 import config as sections, float8, hardware, mx
from titan_float8.config import AUTO_FILTER, Float8Section, MXSection
from titan_float8.tensor_parallel import cast_gathered_inputs
from titan_testing.jobs import make_job

LAYOUT = ModelLayout(
    num_blocks=1,
    dim=64,
    vocab_size=64,
    max_seq_len=8,
    embedding=("embed",),
    blocks="blocks",
    head=("head",),
    rules={"blocks.0.w[13].weight": Column(), "blocks.0.w2.weight": Row()},
    regions=("blocks.0",),
)


def part_of(**layers: tuple[int, int]) -> ModelPart:
    """Return a part with one block of linear layers, (in, out), and a head."""
    with torch.device("meta"):
        block = nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name, sizes in layers.items()})
        module = nn.ModuleDict({
            "embed": nn.Embedding(64, 64), "blocks": nn.ModuleDict({"0": block}), "head": nn.Linear(64, 64, bias=False)
        })  # fmt: skip
    return ModelPart(module, LAYOUT, NextToken())


def context_of(section: Float8Section | MXSection, **degrees: int) -> Any:
    mesh = SimpleNamespace(degree=lambda name: degrees.get(name, 1))
    return SimpleNamespace(section=section, job=SimpleNamespace(mesh=mesh), mesh={}, device=torch.device("cpu"))


def converted(part: ModelPart) -> dict[str, Any]:
    return {name: layer for name, layer in part.named_modules() if isinstance(layer, Float8Linear | mx.MXLinear)}


def test_both_dimensions_must_be_multiples_and_the_head_stays() -> None:
    part = float8.apply(part_of(fits=(64, 48), wide=(64, 40), tall=(40, 64)), context_of(Float8Section()))
    assert list(converted(part)) == ["blocks.0.fits"]
    part = float8.apply(part_of(fits=(64, 48)), context_of(Float8Section(convert_head=True)))
    assert list(converted(part)) == ["blocks.0.fits", "head"]


def test_filters_are_parts_of_names_or_patterns_and_must_match() -> None:
    def layers(*filters: str) -> list[str]:
        part = part_of(w1=(64, 64), w2=(64, 64), v1=(64, 64))
        return list(converted(float8.apply(part, context_of(Float8Section(filter_fqns=list(filters))))))

    assert layers("w1") == layers("blocks.*.w1") == ["blocks.0.w2", "blocks.0.v1"]
    assert layers("blocks.*.?1") == ["blocks.0.w2"]
    with pytest.raises(UserError, match=r"float8\.filter_fqns: 'w9': matches no linear layer"):
        layers("w2", "w9")


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_the_options_reach_the_layers(emulate: bool, shards: int) -> None:
    section = Float8Section(emulate=emulate, enable_fsdp_float8_all_gather=True)
    part = float8.apply(part_of(w1=(64, 64)), context_of(section, dp_shard=shards))
    (layer,) = converted(part).values()
    assert layer.config.emulate is emulate
    assert layer.config.enable_fsdp_float8_all_gather is (shards > 1)
    assert torch.ops.aten.max.default in part.saved_operators


@pytest.mark.parametrize(("recipe", "share"), [("tensorwise", 1.0), ("rowwise", 1.0), ("rowwise_with_gw_hp", 2 / 3)])
def test_the_share_of_matmuls_in_float8_is_recorded(recipe: Any, share: float) -> None:
    part = float8.apply(part_of(w1=(64, 32)), context_of(Float8Section(recipe_name=recipe)))
    assert part.slots["titan_debug.flops"] == {"blocks.0.w1": (torch.float8_e4m3fn, pytest.approx(6 * 64 * 32 * share))}
    emulated = float8.apply(part_of(w1=(64, 32)), context_of(Float8Section(recipe_name=recipe, emulate=True)))
    assert "titan_debug.flops" not in emulated.slots  # they run in high precision


@pytest.mark.parametrize("filters", [["blocks"], [AUTO_FILTER]], ids=["all filtered", "all too small to gain"])
def test_a_conversion_of_nothing_is_refused(filters: list[str]) -> None:
    with pytest.raises(UserError, match=r"\[float8\]: converts no layer"):
        float8.apply(part_of(w1=(64, 64)), context_of(Float8Section(filter_fqns=filters)))


def test_ranks_divide_no_block_of_mxfp8() -> None:
    assert converted(mx.apply(part_of(w1=(32, 64)), context_of(MXSection(emulate=True))))
    with pytest.raises(UserError, match=r"\[mx\]: converts no layer"):
        mx.apply(part_of(w1=(32, 64)), context_of(MXSection(emulate=True), tp=2))


@pytest.mark.parametrize("shape", [(16, 64), (2, 4, 64), (16, 1, 64), (8, 2, 64)], ids=str)
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8_rceil"])
def test_a_layer_that_receives_no_sequences_is_refused_for_nvfp4(recipe: Any, shape: tuple[int, ...]) -> None:
    def problems(*filters: str) -> list[Problem]:
        calls = [ModuleCall("blocks.0.w1", (shape,), shape), ModuleCall("blocks.0.w2", ((2, 8, 64),), (2, 8, 64))]
        trial: Any = SimpleNamespace(
            tokens=torch.zeros(2, 8),
            layout=LAYOUT,
            calls_of=lambda names: [call for call in calls if call.name in names],
        )
        context = context_of(MXSection(recipe_name=recipe, filter_fqns=list(filters)))
        context.config = SimpleNamespace(problem=Problem)
        return list(mx.check_model(part_of(w1=(64, 64), w2=(64, 64)).module, trial, context))

    found = problems()
    assert [problem.where for problem in found] == ["mx.filter_fqns"] * (recipe == "nvfp4")
    for problem in found:
        assert f"'blocks.0.w1' is called with {list(shape)}, not [batch, seq, features] (batch 2, seq 8)" in problem.why
        assert "add 'blocks.0.w1'" in problem.fix
    assert problems("w1") == []


def test_prototypes_of_torchao_are_imported_in_one_file() -> None:
    package = Path(mx.__file__).parent
    files = {file.name for file in package.glob("*.py") if re.search(r"(from|import) torchao\.prototype", file.read_text())}
    assert files == {"torchao_prototypes.py"}


def test_another_torchao_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.prototype.mx_formats.kernels", None)
    for name in ("mx", "grouped_mx", "nvfp4", "torchao_prototypes"):
        monkeypatch.delitem(sys.modules, f"titan_float8.{name}")
    job = make_job("tiny", {"mx.enable": "true", "mx.emulate": "true"})
    (transform,) = job.transforms
    assert transform.apply is not None
    with pytest.raises(
        UserError, match=rf"plugin.*float8.*prototypes of torchao 0\.18, and torchao {version('torchao')} has"
    ):
        transform.apply.load()


@pytest.mark.parametrize(("names", "cast"), [(["w1", "w3"], True), (["w1"], False), ([], False)], ids=str)
def test_a_regions_input_is_cast_if_all_its_columns_are_float8(names: list[str], cast: bool) -> None:
    part = part_of(w1=(64, 64), w2=(64, 64), w3=(64, 64))
    config = float8.linear_config(Float8Section(emulate=True), gather=False)
    others = [f"blocks.0.{name}" for name in ("w1", "w3") if name not in names]
    if names:
        float8.apply(part, context_of(Float8Section(emulate=True, filter_fqns=others)))
    cast_gathered_inputs(part, converted(part), config, ranks=None)  # type: ignore[arg-type]
    assert list(part.slots.get("titan_parallel.region_casts", {})) == (["blocks.0"] if cast else [])


def test_scales_are_computed_at_the_start_and_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[nn.Module] = []
    monkeypatch.setattr(float8, "precompute_float8_dynamic_scale_for_fsdp", computed.append)
    part = part_of(w1=(64, 64))
    observer: Any = float8.PrecomputedScales([part])
    observer.titan_train_start(None)
    assert computed == [part.module]
    observer.titan_step_end(None)
    assert computed == [part.module] * 2


@pytest.mark.parametrize(("capability", "has_float8"), [((8, 0), False), ((8, 9), True), ((9, 0), True)], ids=str)
def test_float8_needs_ada_or_newer(monkeypatch: pytest.MonkeyPatch, capability: Any, has_float8: bool) -> None:
    monkeypatch.setattr(hardware, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(hardware, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    job = make_job("tiny", {"float8.enable": "true", "job.device": "cpu"})
    context: Any = SimpleNamespace(section=Float8Section(), job=job, config=job.config)
    assert [*hardware.float8(context)] == [] if has_float8 else "8.9 or newer" in str(next(iter(hardware.float8(context))))


def test_a_plan_tries_float8_unless_mxfp8_is_on() -> None:
    for enabled, choices in ((False, {"float8.enable": (False, True)}), (True, {})):
        config = SimpleNamespace(section=lambda cls, enabled=enabled: MXSection(enable=enabled))
        assert sections.float8_choices(SimpleNamespace(config=config)) == choices  # type: ignore[arg-type]
