"""Qwen3 and its mixtures of experts: files in both directions, and which of two plugins of one architecture reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from titan_core.cli.main import main
from titan_testing.jobs import make_job

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


@dataclass(frozen=True)
class Family:
    """A model of the library."""

    name: str
    config: dict[str, Any]
    refused: dict[str, Any]
    """What the plugin does not compute."""


WINDOWS: dict[str, Any] = {
    "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2,
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
}  # fmt: skip
DENSE = Family("qwen3", {}, WINDOWS)
EXPERTS = Family("qwen3_moe", {"initializer_range": 0.05}, {"decoder_sparse_step": 2})


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


def test_the_plugin_of_the_family_is_chosen(family: Family) -> None:
    """Both it and titan-models-hf equal the library: ``tests/models_qwen3``, ``test_hf_families.py``."""
    assert make_job("recipe.toml").name == f"{family.name} theirs"
    assert make_job("recipe.toml", {"plugins.disable": '["qwen3"]'}).name == "hf theirs"


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
