"""Products of experts in float8 and MXFP8 train as on one device on every mesh, compiled too, and without a wait of the host
on GPUs.

``uv run pytest -m "full or not full" tests/integration/test_expert_float8.py`` runs all rows of the table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from harness.fake_cuda import FakeCuda
from harness.quick import rows
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_recipe
from titan_testing.meshes import FAST, require_equal, run_in

RECIPE = "qwen3_moe_tiny"
FLOAT8: dict[str, object] = {
    "float8.enable": "true",
    "float8.recipe_name": "rowwise_with_gw_hp",
    "float8.convert_experts": "true",
}
MXFP8: dict[str, object] = {
    "mx.enable": "true",
    "mx.recipe_name": "mxfp8_rceil_wgrad_with_hp",
    "mx.convert_experts": "true",
}
ARGS = "dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 96, n_experts = 4, expert_dim = 32"
HIGH: dict[str, object] = {**FAST, "model.args": f"{{{ARGS}}}", "training.steps": 3}
FORMATS: dict[str, dict[str, object]] = {
    "high": HIGH,
    "float8": {**HIGH, **FLOAT8, "float8.emulate": "true", "float8.filter_fqns": '["attention"]'},
    "mxfp8": {**HIGH, **MXFP8, "mx.emulate": "true", "mx.filter_fqns": '["attention"]'},
}
EP, TP, PP, AC = (
    *(f"parallelism.{name}_parallel_degree" for name in ("expert", "tensor", "pipeline")),
    "activation_checkpoint.mode",
)
DEVICE: dict[str, object] = {"parallelism.expert_parallel_dispatch": "device"}
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "EP 2": (2, {EP: 2}),
    "EP 2, device": (2, {EP: 2, **DEVICE}),
    "EP 2 = TP 2, FSDP 2": (4, {EP: 2, TP: 2, **DEVICE}),
    "EP 2 x FSDP 2": (4, {EP: 2}),
    "TP 2": (2, {TP: 2}),
    "FSDP 2, recomputed": (2, {AC: "full"}),
    "PP 2, some recomputed": (2, {PP: 2, AC: "selective"}),
}
COMPILED: dict[str, object] = {"compile.enable": "true"}
FULL = ("EP 2, device", "EP 2 = TP 2, FSDP 2")
Trained = Callable[[str], RunRecord]
low_formats = pytest.mark.parametrize("form", ["float8", "mxfp8"])


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The record of one device, with experts in a format or in high precision."""

    @functools.cache
    def trained(form: str) -> RunRecord:
        return gloo.run(1, run_in, str(tmp_path_factory.mktemp("one")), FORMATS[form], True, RECIPE)[0]

    return trained


@low_formats
@pytest.mark.parametrize("mesh", rows(MESHES, (), FULL))
def test_a_mesh_trains_as_one_device(gloo: GlooPool, one_device: Trained, tmp_path: Path, mesh: str, form: str) -> None:
    ranks, overrides = MESHES[mesh]
    settings = {**FORMATS[form], **overrides}
    require_equal(gloo.run(ranks, run_in, str(tmp_path), settings, True, RECIPE), one_device(form))


@low_formats
@pytest.mark.parametrize(
    "backend", [pytest.param("aot_eager", marks=pytest.mark.full), pytest.param("inductor", marks=pytest.mark.long)]
)
def test_compiled_blocks_train_as_others(
    gloo: GlooPool, one_device: Trained, tmp_path: Path, form: str, backend: str
) -> None:
    if form == "mxfp8" and backend == "inductor" and Version(torch.__version__) < Version("2.15"):
        pytest.skip("inductor has no type of MXFP8's scales on CPUs (torch 2.11)")
    settings = {**FORMATS[form], **COMPILED, "compile.backend": backend}
    require_equal(gloo.run(1, run_in, str(tmp_path), settings, True, RECIPE), one_device(form))


@low_formats
@pytest.mark.full
def test_experts_train_as_in_high_precision(one_device: Trained, form: str) -> None:
    low, high = one_device(form), one_device("high")
    assert low.losses == pytest.approx(high.losses, rel=5e-3)
    for name, expected in high.gradients.items():
        if ".experts." in name:
            assert 0.005 < float((low.gradients[name] - expected).norm() / expected.norm()) < 0.12, name


@pytest.mark.full
def test_the_host_never_waits_on_a_gpu(fake_cuda: FakeCuda) -> None:
    settings = {**FLOAT8, "model.args": f"{{{ARGS}}}", "training.mixed_precision_param": "bfloat16", "training.steps": 3}
    fake_cuda.train(RECIPE, settings, strict=True)


def mxfp8_product(rows: int, experts: int) -> tuple[int, ...]:
    """Return the shape of an expert's product, of which gradients are computed too."""
    from titan_float8.grouped_mx import MXGroupedLinear

    leaves = [torch.ones(*size, dtype=torch.bfloat16, device="cuda") for size in ((rows, 96), (experts, 192, 96))]
    rows_, weight = (leaf.requires_grad_() for leaf in leaves)
    output = MXGroupedLinear(False)(rows_, weight, torch.ones(experts, dtype=torch.int64, device="cuda"))
    output.sum().backward()
    return tuple(output.shape)


@pytest.mark.full
def test_the_host_never_waits_for_a_product_in_mxfp8(fake_cuda: FakeCuda) -> None:
    """Without training: mx needs a torchao and triton that fit (tests/integration/test_simulated_techniques.py)."""
    assert fake_cuda.run(mxfp8_product, 300, 4, strict=True) == (300, 192)


@pytest.mark.full
def test_experts_of_transformers_are_converted_like_those_of_the_family(in_tmp: Path) -> None:
    from harness.hf_families import library_model

    torch.manual_seed(5)
    library_model("qwen3_moe", initializer_range=0.05).save_pretrained("theirs")
    Path("recipe.toml").write_text('model = {from_pretrained = "theirs", tokenizer = "byte"}')
    settings = {**FLOAT8, "float8.emulate": "true", "training.steps": 1, "training.seq_len": 48, "job.device": "cpu"}
    hf = {"plugins.disable": '["qwen3"]'}
    records = {
        name: run_recipe("recipe.toml", {**settings, **more, "job.dump_folder": name})
        for name, more in (("ours", {}), ("theirs by rows", hf), ("high", {**hf, "float8.convert_experts": "false"}))
    }
    (ours,), (theirs,), (high,) = (record.losses for record in records.values())
    assert theirs == pytest.approx(ours, rel=1e-6)
    assert abs(high / theirs - 1) > 1e-5
