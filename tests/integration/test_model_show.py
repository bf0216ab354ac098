"""``titan model show``: the layout of a recipe's model and of stored weights, and the meshes that divide it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.hf_families import library_model
from titan_core.api import Column, ModelLayout, Row, Rule
from titan_core.cli.main import main
from titan_testing import tiny
from titan_testing.tiny_args import TinyArgs


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


def test_a_mixer_names_the_function_that_divides_it(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library_model("falcon_h1").save_pretrained("weights")
    found = shown(capsys, "weights")
    assert any("divided titan_models_hf.recurrent.convolution:divided" in mixer for mixer in found["mixers"])
    (values, *_) = (value for value in found["initial_values"].values() if value.startswith("Computed("))
    assert values.startswith("Computed(values=titan_models_hf.")
    assert "Ref(" not in str(found)


SWAPPED: dict[str, dict[str, Rule]] = {
    "attention.wq": {"layers.*.attention.w[qkv].weight": Row(), "layers.*.attention.wo.weight": Column()},
    "attention.wv": {"layers.*.attention.wv.weight": Row()},
    "feed_forward.w1": {"layers.*.feed_forward.w[13].weight": Row(), "layers.*.feed_forward.w2.weight": Column()},
}


@pytest.mark.parametrize("layer", SWAPPED)
def test_a_rule_that_cannot_fit_is_named(
    layer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(args: TinyArgs) -> ModelLayout:
        layout = right(args)
        others = {pattern: rule for pattern, rule in layout.rules.items() if pattern not in SWAPPED[layer]}
        return replace(layout, rules={**SWAPPED[layer], **others})

    right = tiny.layout
    monkeypatch.setattr(tiny, "layout", swapped)
    why = f"rules have Row() for 'layers.0.{layer}.weight', but its layer takes the whole input of region 'layers.0."
    assert shown(capsys, "tiny")["meshes"]["parallelism.tensor_parallel_degree"].startswith(f"none: {why}")


def test_overrides_and_a_name_that_is_none(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "hf_debug", "--model.args.config.num_hidden_layers", "2")
    assert found["blocks"] == 2
    assert found["meshes"]["parallelism.pipeline_parallel_degree"] == "2"
    assert main(["model", "show", "hf_debgu"]) == 2
    assert "hf_debgu" in capsys.readouterr().err
