"""Exports name no token that the vocabulary lacks: transformers looks up the row of a padding token."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from harness.quick import rows
from harness.rope_spellings import SIZES
from titan_ckpt.foreign.hf_export import export_config, export_generation_config
from titan_core.api import UserError, WeightFormat
from titan_models_hf import transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.formats import from_args
from titan_models_hf.library import configuration
from titan_models_hf.plugin import titan_models
from titan_models_llama.config import FLAVORS
from titan_models_llama.plugin import titan_models as llama_models
from titan_testing.jobs import run_recipe

SMALL = {key: value for key, value in SIZES.items() if key != "pad_token_id"}
NOT_NULL = {
    "modernbert-decoder": {"bos", "cls", "sep"},
    "cwm": {"bos"},
    "marian": {"decoder_start"},
    "whisper": {"decoder_start"},
}
"""Architectures whose config accepts no null for these ids, and whose defaults exceed small vocabularies."""


def form_of(models: Any) -> WeightFormat:
    (model,) = models()
    return next(form for form in model.formats if form.files == "safetensors")


def small_args(architecture: str) -> HFArgs:
    known = library.config_keys(architecture)
    return HFArgs(architecture=architecture, config={key: value for key, value in SMALL.items() if key in known})


def outside(contents: dict[str, Any]) -> set[str]:
    """Return the keys of ids that the vocabulary lacks."""
    return {
        key.removesuffix("_token_id")
        for key, value in contents.items()
        if key.endswith("_token_id")
        for one in (value if isinstance(value, list) else [value])
        if one is not None and not 0 <= one < contents["vocab_size"]
    }


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("architecture", ["smollm3", "flex_olmo", "modernbert-decoder", "cwm", "qwen3"])
def test_a_family_whose_ids_exceed_a_small_vocabulary(architecture: str, tmp_path: Path) -> None:
    contents = export_config(form_of(titan_models), small_args(architecture), {}, "float32")
    assert outside(contents) == NOT_NULL.get(architecture, set())
    (tmp_path / "config.json").write_text(json.dumps(contents))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert model.get_input_embeddings().weight.shape[0] == contents["vocab_size"]


@pytest.mark.full
def test_all_architectures() -> None:
    seen = 0
    for architecture in library.architectures():
        args = small_args(architecture)
        with suppress(UserError):
            configuration(args)
            contents = from_args(args)
            if contents.get("vocab_size") == SMALL["vocab_size"]:
                assert outside(contents) <= NOT_NULL.get(architecture, set()), architecture
                assert library.accepts(contents.pop("model_type"), contents)
                seen += 1
    assert seen > 100


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padding": ({"pad_token_id": 128_004}, {"pad_token_id": None}),
    "negative": ({"pad_token_id": -1}, {"pad_token_id": None}),
    "several ends": ({"eos_token_id": [2, 128_001]}, {"eos_token_id": [2]}),
    "no end": ({"eos_token_id": [128_001]}, {"eos_token_id": None}),
    "inside": ({"pad_token_id": 0, "bos_token_id": 1}, {"pad_token_id": 0, "bos_token_id": 1}),
}


@pytest.mark.parametrize("case", rows(CONFIGS, ["padding", "several ends"]))
def test_ids_of_the_files_that_a_run_started_from(case: str) -> None:
    given, expected = CONFIGS[case]
    form = form_of(llama_models)
    args = FLAVORS["debug"]
    assert form.from_args is not None
    about = {"hf": {"config": {**form.from_args.load()(args), **given}}}
    found = export_config(form, args, about, "float32")
    assert {key: found[key] for key in expected} == expected


def test_ids_of_generation() -> None:
    config = {
        "eos_token_id": [2, 300], "decoder_start_token_id": 999, "suppress_tokens": [5, 400], "max_length": 4096,
        "bad_words_ids": [[7, 8], [7, 500]], "temperature": 0.6, "begin_suppress_tokens": [],
    }  # fmt: skip
    assert export_generation_config({"hf": {"generation_config": config}}, 288) == {
        "eos_token_id": [2], "decoder_start_token_id": None, "suppress_tokens": [5], "max_length": 4096,
        "bad_words_ids": [[7, 8]], "temperature": 0.6, "begin_suppress_tokens": [],
    }  # fmt: skip


@pytest.mark.parametrize("architecture", rows(["smollm3", "flex_olmo", "apertus"], ["smollm3"]))
def test_a_runs_export_is_loaded(architecture: str, in_tmp: Path) -> None:
    sizes = "vocab_size = 288, hidden_size = 64, intermediate_size = 96, num_hidden_layers = 2, num_attention_heads = 4"
    args = f'architecture = "{architecture}", config = {{{sizes}, num_key_value_heads = 2}}'
    overrides: dict[str, object] = {
        "model.flavor": "", "model.args": f"{{{args}}}", "training.steps": 1, "job.device": "cpu", "job.dump_folder": "run",
        "checkpoint.enable": "true", "checkpoint.export": "hf",
    }  # fmt: skip
    if architecture == "apertus":  # starts from files
        contents = from_args(small_args(architecture))
        config = transformers.AutoConfig.for_model(contents.pop("model_type"), **contents)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained("first")
        overrides |= {"model.from_pretrained": "first", "model.args": "{}", "model.tokenizer": "byte"}
    run_recipe("hf_debug", overrides)
    (file,) = Path("run").rglob("config.json")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(file.parent, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.isfinite(model(torch.arange(48)[None]).logits).all()
