"""Qwen3 on meshes. Qwen3 and its mixtures of experts: files in both directions, and beside the same architecture of
titan-models-hf.

``uv run pytest -m "full or not full" tests/integration/test_qwen3.py`` runs all rows of the table."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

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


@dataclass(frozen=True)
class Family:
    """A model of the library, and what is compared."""

    name: str
    config: dict[str, Any]
    gradients: tuple[tuple[str, str], ...]
    """Parameters here and in the library."""
    refused: dict[str, Any]
    """What the plugin does not compute."""
    settings: dict[str, object] = field(default_factory=dict)


WINDOWS: dict[str, Any] = {
    "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2,
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
}  # fmt: skip
EMBEDDING = ("tok_embeddings.weight", "model.embed_tokens.weight")
DENSE = Family(
    "qwen3", {}, (EMBEDDING, ("layers.1.attention.q_norm.weight", "model.layers.1.self_attn.q_norm.weight")), WINDOWS
)
EXPERTS = Family(
    "qwen3_moe",
    {"initializer_range": 0.05},
    (
        EMBEDDING,
        ("layers.1.feed_forward.router.weight", "model.layers.1.mlp.gate.weight"),
        ("layers.1.feed_forward.experts.w2", "model.layers.1.mlp.experts.down_proj"),
    ),
    {"decoder_sparse_step": 2},
    {"experts.balance": "sequence", "experts.balance_weight": 0.1},
)


@pytest.fixture(
    params=[
        pytest.param((DENSE, {}), id="untied"),
        pytest.param((DENSE, {"tie_word_embeddings": True}), id="tied", marks=pytest.mark.full),
        pytest.param((EXPERTS, {"mlp_only_layers": []}), id="experts everywhere"),
        pytest.param((EXPERTS, {"mlp_only_layers": [0]}), id="first layer dense", marks=pytest.mark.full),
    ]
)
def family(request: pytest.FixtureRequest, in_tmp: Path) -> Family:
    """The library's random model in a folder, and a recipe that starts from it."""
    from harness.hf_families import library_model

    torch.manual_seed(5)
    found, config = request.param
    library_model(found.name, **found.config, **config).save_pretrained("theirs")
    Path("recipe.toml").write_text(RECIPE)
    return cast(Family, found)


def test_the_plugin_of_the_family_is_chosen_and_equals_the_library_of_all_families(family: Family) -> None:
    hf: dict[str, object] = {"plugins.disable": '["qwen3"]'}
    ours = run_recipe("recipe.toml", {**family.settings, "job.dump_folder": "ours"}, weights=True)
    theirs = run_recipe("recipe.toml", {**family.settings, **hf, "job.dump_folder": "hf"}, weights=True)
    assert make_job("recipe.toml").name == f"{family.name} theirs"
    assert make_job("recipe.toml", hf).name == "hf theirs"
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-5)
    assert ours.statistics == theirs.statistics
    for step, balance in zip(ours.auxiliary, theirs.auxiliary, strict=True):
        assert step == pytest.approx(balance, rel=1e-6)
    for name, parameter in family.gradients:
        found, expected = ours.gradients[name], theirs.gradients[parameter]
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name


def test_files_are_read_and_written_as_the_library_does(family: Family) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    assert main(["checkpoint", "convert", "theirs", "ours"]) == 0
    assert main(["checkpoint", "convert", "ours", "back"]) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(name).state_dict() for name in ("theirs", "back"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert json.loads(Path("back/config.json").read_text())["model_type"] == family.name
    first, second = (
        {name for file in Path(folder).glob("*.safetensors") for name in load_file(file)} for folder in ("theirs", "back")
    )
    assert first == second
    assert ("model.layers.1.mlp.experts.3.up_proj.weight" in first) is (family is EXPERTS)


def test_what_the_plugin_refuses_is_left_to_the_library_of_all_families(family: Family) -> None:
    config = json.loads(Path("theirs/config.json").read_text())
    Path("theirs/config.json").write_text(json.dumps(config | family.refused))
    assert make_job("recipe.toml").name == "hf theirs"
