"""``titan model show``: the layout of a recipe's model and of stored weights, and the meshes that divide it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.hf_families import library_model
from titan_core.cli.main import main


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["model", "show", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_recipe(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "hf_debug")
    assert (found["name"], found["blocks"], found["masks_documents"]) == ("hf", 4, True)
    layers = [f"model.layers.{index}.self_attn.titan_mixer" for index in range(4)]
    assert found["mixers"] == {"causal attention, heads 4, kv_heads 2": layers}
    assert found["meshes"]["parallelism.tensor_parallel_degree"] == "2"  # key heads
    assert found["meshes"]["parallelism.pipeline_parallel_degree"] == "2, 4"  # blocks
    assert found["meshes"]["parallelism.context_parallel_degree"] == "2, 4, 8"
    assert main(["model", "show", "llama3_debug"]) == 0
    assert "layers.*.attention.mixer: causal attention, heads 8, kv_heads 4" in capsys.readouterr().out


def test_a_folder_of_weights(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library_model("gpt_oss").save_pretrained("weights")
    found = shown(capsys, "weights")
    assert found["arguments"]["architecture"] == "gpt_oss"
    assert {mixer: len(modules) for mixer, modules in found["mixers"].items()} == {
        "causal attention, heads 4, kv_heads 2, window 16, sinks True": 2,
        "causal attention, heads 4, kv_heads 2, sinks True": 2,
    }


def test_overrides_and_a_name_that_is_none(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "hf_debug", "--model.args.config.num_hidden_layers", "2")
    assert found["blocks"] == 2
    assert found["meshes"]["parallelism.pipeline_parallel_degree"] == "2"
    assert main(["model", "show", "hf_debgu"]) == 2
    assert "hf_debgu" in capsys.readouterr().err
