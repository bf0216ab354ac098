"""Emulated float8 and MXFP8 on every mesh, and high-precision weights in checkpoints.

``uv run pytest -m long tests/integration/test_low_precision.py`` runs the whole table, 200 steps of ``llama3_debug`` for
each recipe and mesh. The full run trains a smaller model for fewer steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness import low_precision
from harness.fake_cuda import FakeCuda
from harness.low_precision import FAST, RECIPES, WHOLE
from harness.objectives import first_step
from harness.quick import rows
from titan_core.api import Batch
from titan_core.cli.main import main
from titan_core.loop.world import join_world
from titan_core.model.build import build_parts
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job
from titan_testing.meshes import require_equal, run_in as run_with_weights


def run_in(folder: str, overrides: dict[str, object]) -> RunRecord:
    return low_precision.run_in(folder, overrides, "llama3_debug")


def run_with_gradients(folder: str, overrides: dict[str, object]) -> RunRecord:
    return run_with_weights(folder, overrides, recipe="llama3_debug")


AC = "activation_checkpoint.mode"
TP, PP, CP = (f"parallelism.{name}_parallel_degree" for name in ("tensor", "pipeline", "context"))


MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "alone": (1, {}),
    "FSDP 2": (2, {}),
    "TP 2": (2, {TP: 2}),
    "TP 2, compiled": (2, {TP: 2, "compile.enable": "true", "compile.backend": "aot_eager"}),
    "FSDP 2 x TP 2": (4, {TP: 2}),
    "PP 2": (2, {PP: 2}),
    "selective": (1, {"activation_checkpoint.mode": "selective"}),
}


def whole_table() -> list[Any]:
    """Pairs of recipe and mesh. A float8 all-gather is tested only under FSDP; elsewhere it equals "tensorwise"."""
    pairs = [(recipe, mesh) for recipe in RECIPES for mesh in MESHES if "gather" not in recipe or "FSDP" in mesh]
    return [pytest.param(recipe, mesh, id=f"{recipe} - {mesh}") for recipe, mesh in pairs]


@pytest.fixture(scope="module")
def bf16_whole(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return gloo.run(1, run_in, str(tmp_path_factory.mktemp("bf16")), WHOLE)[0].losses


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "mesh"), whole_table())
def test_whole(gloo: GlooPool, bf16_whole: list[float], tmp_path: Path, recipe: str, mesh: str) -> None:
    """The mean loss of the last ten steps is within 2 % of that of bf16."""
    ranks, overrides = MESHES[mesh]
    losses = gloo.run(ranks, run_in, str(tmp_path), {**WHOLE, **RECIPES[recipe], **overrides})[0].losses
    last, expected = sum(losses[-10:]) / 10, sum(bf16_whole[-10:]) / 10
    print(f"\n| {recipe} | {mesh} | {last:.4f} | {expected:.4f} | {last / expected - 1:+.2%} |")
    assert last == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("tensorwise, float8 all-gather", marks=pytest.mark.full),
        pytest.param("mxfp8_rceil", marks=pytest.mark.long),
    ],
)
def test_checkpoints_hold_high_precision_and_load_into_bf16_and_back(gloo: GlooPool, tmp_path: Path, recipe: str) -> None:
    saved = {**FAST, "checkpoint.enable": "true", "checkpoint.interval": 4, "job.dump_folder": "run", "training.steps": 12}
    saved["checkpoint.allow_changed"] = '["float8.*", "mx.*", "training.mixed_precision_param"]'
    whole = gloo.run(2, run_in, str(tmp_path), {**saved, **RECIPES[recipe], "job.dump_folder": "whole"})[0]
    first = gloo.run(2, run_in, str(tmp_path), {**saved, **RECIPES[recipe], "training.stop_at_step": 4})[0]
    assert first.losses == whole.losses[:4]
    import json

    manifest = json.loads((tmp_path / "run/checkpoint/step-4/checkpoint.json").read_text())["checkpoint"]
    assert {one[0] for name, one in manifest["tensors"].items() if name.startswith("model.")} == {"float32"}
    # Resume in bf16 on another mesh, then in float8 again.
    middle = gloo.run(1, run_in, str(tmp_path), {**saved, "training.stop_at_step": 8})[0]
    last = gloo.run(2, run_in, str(tmp_path), {**saved, **RECIPES[recipe], TP: 2})[0]
    assert [*first.losses, *middle.losses, *last.losses] == pytest.approx(whole.losses, rel=0.02)
    assert len(last.losses) == 4
    exported = tmp_path / "hf"
    assert main(["checkpoint", "convert", str(tmp_path / "run/checkpoint/step-12"), str(exported)]) == 0
    from safetensors.torch import load_file

    tensors = load_file(exported / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.full
def test_resuming_is_exact(gloo: GlooPool, tmp_path: Path) -> None:
    settings = {**FAST, **RECIPES["tensorwise, float8 all-gather"], "checkpoint.enable": "true", "checkpoint.interval": 6,
                "training.deterministic": "true"}  # fmt: skip
    whole = gloo.run(2, run_in, str(tmp_path), {**settings, "job.dump_folder": "whole"})[0]
    for stop in (6, 12):
        again = gloo.run(2, run_in, str(tmp_path), {**settings, "job.dump_folder": "run", "training.stop_at_step": stop})[0]
        assert again.losses == whole.losses[stop - 6 : stop]


def gathers_in_float8(folder: str, overrides: dict[str, object]) -> int:
    """Train, and return the number of float8 gathers."""
    from titan_float8 import torch_private

    original, count = torch_private.Float8TrainingTensor, 0

    def made(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return original(*arguments)

    torch_private.Float8TrainingTensor = made
    try:
        run_in(folder, overrides)
    finally:
        torch_private.Float8TrainingTensor = original
    return count


@pytest.mark.full
def test_tensor_parallelism_gathers_in_float8_where_the_recipe_allows_it(gloo: GlooPool, tmp_path: Path) -> None:
    settings = {**FAST, "training.steps": 2, TP: 2}

    def count(**more: object) -> int:
        return gloo.run(2, gathers_in_float8, str(tmp_path), {**settings, **more})[0]

    # The inputs of attention and feed-forward, in 2 blocks, 4 microbatches and 2 steps.
    assert count(**RECIPES["tensorwise"]) == 2 * 2 * 4 * 2
    assert count(**RECIPES["rowwise"]) == 0
    assert count(**RECIPES["tensorwise"], **{"float8.filter_fqns": "['wq']"}) == 2 * 4 * 2


Runs = Callable[[str], RunRecord]


@pytest.fixture(scope="module")
def alone(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Train a recipe (or bf16) on one device, with a small job."""

    def run(recipe: str) -> RunRecord:
        folder = tmp_path_factory.mktemp("alone")
        return gloo.run(1, run_in, str(folder), {**FAST, **RECIPES.get(recipe, {})})[0]

    return functools.cache(run)


@pytest.mark.parametrize(
    ("recipe", "mesh"),
    [
        pytest.param("tensorwise", "FSDP 2", marks=pytest.mark.long),
        pytest.param("tensorwise, float8 all-gather", "FSDP 2", marks=pytest.mark.long),
        pytest.param("tensorwise, float8 all-gather", "FSDP 2 x TP 2", marks=pytest.mark.full),
        pytest.param("rowwise", "FSDP 2 x TP 2", marks=pytest.mark.long),
        pytest.param("rowwise", "PP 2", marks=pytest.mark.full),
        pytest.param("rowwise_with_gw_hp", "TP 2", marks=pytest.mark.full),
        pytest.param("tensorwise", "TP 2, compiled", marks=pytest.mark.full),
        pytest.param("mxfp8_rceil", "FSDP 2 x TP 2", marks=pytest.mark.full),
        pytest.param("mxfp8_rceil", "PP 2", marks=pytest.mark.long),
        pytest.param("tensorwise", "selective", marks=pytest.mark.long),
        pytest.param("mxfp8_rceil", "selective", marks=pytest.mark.full),
    ],
)
def test_a_mesh_changes_nothing_but_rounding(gloo: GlooPool, alone: Runs, tmp_path: Path, recipe: str, mesh: str) -> None:
    ranks, overrides = MESHES[mesh]
    records = gloo.run(ranks, run_in, str(tmp_path), {**FAST, **RECIPES[recipe], **overrides})
    for record in records:
        assert record.losses == pytest.approx(alone(recipe).losses, rel=5e-3)


NVFP4_WIDE: dict[str, object] = {
    **FAST,
    **RECIPES["nvfp4"],
    # All sides are multiples of 32 on each rank, so that all meshes convert the same layers.
    "model.args": "{dim = 128, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 256}",
    "training.mixed_precision_param": "float32",
    "training.steps": 2,
}
NVFP4_MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "accumulation": (1, {"training.local_batch_size": 4}),
    "compiled, selective": (1, {"compile.enable": "true", "compile.backend": "aot_eager", AC: "selective"}),
    "full": (1, {AC: "full"}),
    "FSDP 2": (2, {}),
    "TP 2": (2, {TP: 2}),
    "TP 2, no SP": (2, {TP: 2, "parallelism.disable_sequence_parallel": "true"}),
    "PP 2, zero bubble": (2, {PP: 2, "parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble"}),
    "CP 2": (2, {CP: 2}),
    "TP 2 x CP 2, compiled": (4, {TP: 2, CP: 2, "compile.enable": "true", "compile.backend": "aot_eager"}),
}


@pytest.fixture(scope="module")
def nvfp4_alone(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return gloo.run(1, run_with_gradients, str(tmp_path_factory.mktemp("nvfp4")), NVFP4_WIDE)[0]


@pytest.mark.parametrize("mesh", rows(NVFP4_MESHES, (), ("full", "TP 2", "PP 2, zero bubble", "CP 2")))
def test_nvfp4_rounds_alike_on_every_mesh(gloo: GlooPool, nvfp4_alone: RunRecord, tmp_path: Path, mesh: str) -> None:
    """In fp32, so that sums differ little between meshes: every gradient, although its rounding is random. Where a sum
    differs in its last bit, now and then a number is rounded to its other neighbour. Other draws would give gradients that
    differ by 0.2."""
    ranks, overrides = NVFP4_MESHES[mesh]
    records = gloo.run(ranks, run_with_gradients, str(tmp_path), {**NVFP4_WIDE, **overrides})
    # Adam would magnify the difference of gradients that are nearly 0.
    require_equal(records, replace(nvfp4_alone, final={}), loss=1e-4, gradient=2e-3)


class CountLargest(TorchDispatchMode):
    """Counts the max-reductions of a tensor or of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        self.calls += function in (torch.ops.aten.max.default, torch.ops.aten.amax.default)
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_selective_recomputation_keeps_what_scales_are_computed_from(in_tmp: Path, recipe: str) -> None:
    def searches(mode: str) -> int:
        small = "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}"
        settings = {"model.args": small, "training.seq_len": 32, "training.local_batch_size": 1, "job.device": "cpu"}
        float8 = {"float8.enable": "true", "float8.emulate": "true", "float8.recipe_name": recipe}
        job = make_job("llama3_debug", {**settings, **float8, "activation_checkpoint.mode": mode})
        with join_world(job) as world:
            (part,) = build_parts(job, world.mesh, world.device)
            tokens = torch.zeros(1, 32, dtype=torch.int64)
            with CountLargest() as count:
                part.forward_loss(first_step(Batch(tokens, tokens))).backward()
            return count.calls

    assert searches("selective") == searches("none") < searches("full")


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("tensorwise", marks=pytest.mark.long)])
def test_selective_recomputation_keeps_every_second_float8_matmul(fake_cuda: FakeCuda, recipe: str) -> None:
    small = "{dim = 64, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 128}"
    settings = {"model.args": small, "training.seq_len": 64, "training.local_batch_size": 1, "training.global_batch_size": 1}
    float8 = {"float8.enable": "true", "float8.recipe_name": recipe, "training.mixed_precision_param": "bfloat16"}

    def flops(mode: str) -> int:
        found = fake_cuda.train("llama3_debug", {**settings, **float8, "activation_checkpoint.mode": mode}, strict=False)
        return found.steps[-1].phase("backward").flops

    assert flops("none") < flops("selective") < flops("full")
