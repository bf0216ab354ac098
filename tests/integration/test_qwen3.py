"""Qwen3 on meshes, its files in both directions, and beside the same architecture of titan-models-hf.

``uv run pytest -m "full or not full" tests/integration/test_qwen3.py`` runs all rows of the table."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, make_job, run_recipe
from harness.meshes import CASES, FAST, Case, require_equal, run_in
from titan_core.cli.main import main

SETTINGS: dict[str, object] = {**FAST, "training.steps": 2}
"""The heads together are wider than the hidden states, as in the small published sizes: the flavor's ``head_dim`` stays."""
QUICK = ("TP 2", "CP 2")
FULL = ("FSDP 2", "TP 2, no SP", "PP 2, 1F1B", "PP 2, ZBVZeroBubble", "CP 2 by heads", "FSDP x TP", "FSDP x PP", "TP x CP")
BY_NAME = {case.name: case for case in CASES}
RECIPE = """
[model]
from_pretrained = "theirs"
tokenizer = "byte"
[training]
seq_len = 48
local_batch_size = 2
global_batch_size = 4
steps = 3
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 0
[job]
device = "cpu"
"""

Reference = Callable[[str], RunRecord]


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The record of one device, by whether the embedding is tied."""

    @functools.cache
    def trained(tied: str) -> RunRecord:
        folder = str(tmp_path_factory.mktemp(tied))
        return gloo.run(1, run_in, folder, {**SETTINGS, "model.args.tie_embeddings": tied}, True, "qwen3_debug")[0]

    return trained


def rows() -> list[object]:
    return [
        *(pytest.param(BY_NAME[name], "false", id=name) for name in QUICK),
        *(pytest.param(BY_NAME[name], "false", id=name, marks=pytest.mark.full) for name in FULL),
        pytest.param(BY_NAME["PP 2, 1F1B"], "true", id="PP 2, tied", marks=pytest.mark.full),
        pytest.param(BY_NAME["FSDP x TP"], "true", id="FSDP x TP, tied", marks=pytest.mark.full),
    ]


@pytest.mark.parametrize(("case", "tied"), rows())
def test_a_mesh_trains_as_one_device(gloo: GlooPool, one_device: Reference, tmp_path: Path, case: Case, tied: str) -> None:
    overrides = {**SETTINGS, "model.args.tie_embeddings": tied, **case.overrides}
    require_equal(gloo.run(case.ranks, run_in, str(tmp_path), overrides, True, "qwen3_debug"), one_device(tied))


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.full)], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, in_tmp: Path) -> Path:
    """A folder with the library's random model, and a recipe that starts from it."""
    from harness.hf_families import library_model

    torch.manual_seed(5)
    library_model("qwen3", tie_word_embeddings=request.param).save_pretrained("theirs")
    Path("recipe.toml").write_text(RECIPE)
    return in_tmp


def test_the_plugin_of_the_family_is_chosen_and_equals_the_library_of_all_families(folder: Path) -> None:
    ours = run_recipe("recipe.toml", {"job.dump_folder": "ours"}, weights=True)
    theirs = run_recipe("recipe.toml", {"job.dump_folder": "hf", "plugins.disable": '["qwen3"]'}, weights=True)
    assert make_job("recipe.toml").name == "qwen3 theirs"
    assert make_job("recipe.toml", {"plugins.disable": '["qwen3"]'}).name == "hf theirs"
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-5)
    for name, parameter in (("tok_embeddings", "embed_tokens"), ("layers.1.attention.q_norm", "layers.1.self_attn.q_norm")):
        found, expected = ours.gradients[f"{name}.weight"], theirs.gradients[f"model.{parameter}.weight"]
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name


def test_files_are_read_and_written_as_the_library_does(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert main(["checkpoint", "convert", "theirs", "ours"]) == 0
    assert main(["checkpoint", "convert", "ours", "back"]) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(name).state_dict() for name in ("theirs", "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert json.loads(Path("back/config.json").read_text())["model_type"] == "qwen3"


def test_what_the_plugin_refuses_is_left_to_the_library_of_all_families(folder: Path) -> None:
    config = json.loads(Path("theirs/config.json").read_text())
    kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "layer_types": kinds}
    Path("theirs/config.json").write_text(json.dumps(config | window))
    assert make_job("recipe.toml").name == "hf theirs"
