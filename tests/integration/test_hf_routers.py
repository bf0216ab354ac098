"""Routers of transformers: their z-loss is that of the formula in a plain loop of the library, and the biases of their
choice balance experts, the same to the bit on every mesh, in checkpoints and in files of the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from harness.expert_biases import Biases, biases_of
from harness.hf_families import (
    MESHES,
    gradient_difference,
    largest_difference,
    of_library,
    settings,
    train,
    train_and_reference,
)
from harness.quick import rows
from titan_core.cli.main import main
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord

WEIGHT = 0.1
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe", "qwen3_next")
LOSSES = [f"{family}, {mesh}" for family in FAMILIES for mesh in ("one", "ep2", "tp2", "tp2 whole", "cp2", "pp2")]
QUICK_LOSSES = ("gpt_oss, one", "deepseek_v3, tp2 whole")
FULL_LOSSES = ("deepseek_v3, tp2", "mixtral, ep2", "qwen3_moe, cp2", "gpt_oss, pp2", "deepseek_v3, ep2", "qwen3_next, one")

BIASED: dict[str, object] = {"experts.balance": "bias", "experts.bias_rate": 0.05, "training.steps": 3}
BIAS = "e_score_correction_bias"
BIASES = [f"{family}, {mesh}" for family in ("deepseek_v3", "glm4_moe") for mesh in ("ep2", "tp2", "cp2", "pp2", "ep2 tp2")]
QUICK_BIASES = ("deepseek_v3, ep2",)
FULL_BIASES = ("deepseek_v3, pp2", "glm4_moe, ep2 tp2", "glm4_moe, cp2")


@pytest.mark.parametrize("row", rows(LOSSES, QUICK_LOSSES, FULL_LOSSES))
def test_the_z_loss_and_its_gradients_are_those_of_the_formula(tmp_path: Path, gloo: GlooPool, row: str) -> None:
    family, mesh = row.split(", ")
    z_loss = {"experts.z_loss_weight": WEIGHT, "training.steps": 3}
    one = {**settings(family, "one", None, tmp_path / "one"), **z_loss}
    ((found, expected),) = gloo.run(1, train_and_reference, family, one, WEIGHT)
    gradients = found.gradients
    if mesh != "one":
        ranks = gloo.run(MESHES[mesh][0], train, {**settings(family, mesh, None, tmp_path / "mesh"), **z_loss})
        gradients = of_library(family, {name: gradient for rank in ranks for name, gradient in rank.gradients.items()})
        found = ranks[0]
    assert expected.z_losses[0] > WEIGHT
    assert largest_difference(found.z_losses[:1], expected.z_losses[:1]) < 1e-6
    assert largest_difference(found.z_losses, expected.z_losses) < 1e-5
    assert largest_difference(found.losses, expected.losses) < 2e-6
    assert gradient_difference(gradients, expected.gradients)[0] < 5e-6


def biased(gloo: GlooPool, family: str, mesh: str, folder: Path, **more: object) -> list[tuple[RunRecord, Biases]]:
    """Train a family whose experts are balanced by biases, and return each rank's record and biases."""
    overrides = {**settings(family, mesh, None, folder / mesh), **BIASED, **more}
    return gloo.run(MESHES[mesh][0], biases_of, str(folder), "hf_debug", overrides, BIAS)


@pytest.mark.parametrize("row", rows(BIASES, QUICK_BIASES, FULL_BIASES))
def test_biases_balance_experts_with_the_same_rows_on_every_mesh(tmp_path: Path, gloo: GlooPool, row: str) -> None:
    family, mesh = row.split(", ")
    ((one, expected),) = biased(gloo, family, "one", tmp_path)
    assert sorted(expected) == [f"model.layers.{block}.mlp.gate.{BIAS}" for block in (1, 2, 3)]
    for block in (1, 2, 3):
        bias = torch.zeros(4)
        for step, statistics in enumerate(one.statistics):
            loads = torch.tensor(statistics["experts_rows"][block]).double()
            bias += 0.05 * torch.sign(loads.mean() - loads).float()
            assert torch.equal(expected[f"model.layers.{block}.mlp.gate.{BIAS}"][step], bias)
    seen: set[str] = set()
    for record, found in biased(gloo, family, mesh, tmp_path):
        assert record.losses == pytest.approx(one.losses, rel=2e-6)
        assert record.statistics == one.statistics
        for name, values in found.items():
            assert all(torch.equal(*pair) for pair in zip(values, expected[name], strict=True)), name
        seen |= found.keys()
    assert seen == expected.keys()


def first_biases(folder: str, overrides: dict[str, object]) -> dict[str, Tensor]:
    """Return the biases with which a run of a recipe begins."""
    from titan_core.api import hookimpl
    from titan_testing.jobs import run_recipe

    os.chdir(folder)
    found: dict[str, Tensor] = {}

    class Observed:
        @hookimpl
        def titan_train_start(self, run: Any) -> None:
            named = run.parts[0].module.named_buffers()
            found.update({name: bias.clone() for name, bias in named if name.endswith(BIAS)})

    run_recipe("hf_debug", overrides, observers=[Observed()])
    return found


@pytest.mark.full
def test_biases_are_saved_exported_and_read_back(tmp_path: Path, gloo: GlooPool, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"checkpoint.enable": "true", "job.dump_folder": str(tmp_path / "run")}
    ((one, expected),) = biased(gloo, "deepseek_v3", "one", tmp_path)
    biased(gloo, "deepseek_v3", "ep2", tmp_path, **saved, **{"training.stop_at_step": 2})
    ((resumed, found),) = biased(gloo, "deepseek_v3", "one", tmp_path, **saved)
    assert resumed.losses == pytest.approx(one.losses[2:], rel=2e-6)
    assert all(torch.equal(values[0], expected[name][2]) for name, values in found.items())
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "convert", "run", "exported"]) == 0
    files = [load_file(file) for file in Path("exported").glob("*.safetensors")]
    exported = {name: tensor for tensors in files for name, tensor in tensors.items() if name.endswith(BIAS)}
    assert exported.keys() == expected.keys()
    begun: dict[str, object] = {
        "model.from_pretrained": "exported", "model.flavor": "", "training.steps": 1, "job.device": "cpu",
        "job.dump_folder": str(tmp_path / "again"),
    }  # fmt: skip
    (read,) = gloo.run(1, first_biases, str(tmp_path), begun)
    for name, values in expected.items():
        assert exported[name].dtype == torch.float32
        assert torch.equal(exported[name], values[2]) and torch.equal(read[name], values[2]), name


def test_a_family_without_a_bias_in_its_files_is_refused(tmp_path: Path, gloo: GlooPool) -> None:
    why = r"experts\.balance.*model 'hf' has no bias of the choice of experts.*that its weight files hold.*\"global\""
    with pytest.raises(RuntimeError, match=why):
        biased(gloo, "mixtral", "one", tmp_path)
