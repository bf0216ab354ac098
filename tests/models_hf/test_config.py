"""A ``config.json`` is read as the library reads it, in any of its spellings, and written so that the library reads the same
again."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness.quick import rows
from harness.rope_spellings import KINDS, SIZES, equal, frequencies, library_config, spellings
from titan_core.api import UserError
from titan_models_hf.config import HFArgs
from titan_models_hf.formats import arguments, from_args, to_args
from titan_models_hf.library import configuration
from titan_models_hf.transformers_private import architectures, plain_config

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
    "olmo3": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"original_max_position_embeddings": 128},
    "mistral": {},
    "cohere2_moe": {},
    "gpt_neox": {"rotary_pct": 0.5},
}


def files(family: str, kind: str) -> dict[str, dict[str, Any]]:
    base = {"model_type": family, **SIZES, **FAMILIES[family]}
    return {name: {**base, **keys} for name, keys in spellings(kind).items()}


CELLS = [f"{family} {kind}" for family in FAMILIES for kind in KINDS]


@pytest.mark.parametrize("cell", rows(CELLS, ["olmo3 linear"]))
def test_rotary_frequencies_are_those_of_the_library(cell: str, tmp_path: Path) -> None:
    family, kind = cell.split()
    computed = 0
    for name, contents in files(family, kind).items():
        theirs = library_config(contents, tmp_path / "file")
        try:
            args = arguments(contents)
        except ValueError:
            continue  # with the name of the key, or with the library's own words
        written = library_config(from_args(args), tmp_path / "written")
        assert configuration(args).rope_parameters == written.rope_parameters == theirs.rope_parameters, name
        expected = frequencies(theirs)
        for ours in (configuration(args), written, configuration(arguments(from_args(args)))):
            assert equal(frequencies(ours), expected), name
        computed += expected is not None
    assert computed >= 4


TWICE: dict[str, tuple[str, dict[str, Any]]] = {
    "a window that is off": ("qwen2", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}),
    "a window that is on": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "no window, and a size": ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}),
    "types of layers before a window's layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0, "layer_types": ["full_attention"] * 2},
    ),
    "types of layers before a pattern": (
        "gemma3_text",
        {"sliding_window_pattern": 2, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "types of layers of mistral": (
        "mistral",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
    ),
    "a size of the window plus one": ("mimo_v2_flash", {"sliding_window": 16, "sliding_window_size": 32}),
    "the width of a head": ("llama", {"head_dim": 24}),
    "no width of a head": ("llama", {"head_dim": None}),
    "no groups": ("qwen3", {"num_key_value_heads": None}),
    "two dtypes": ("llama", {"dtype": "float16", "torch_dtype": "bfloat16"}),
    "a computed key": ("bailing_hybrid", {"head_dim": 64, "linear_head_dim": 128}),
    "a part of the head by another key": ("cohere2_moe", {"partial_rotary_factor": 0.5}),
    "a layer of its own": ("llama", {"per_layer_config": {"1": {"intermediate_size": 32}}}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
}
"""Keys that a file states in two ways, or beside others that change their meaning."""


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("case", TWICE)
def test_a_key_with_two_homes_is_read_as_the_library_reads_it(case: str, tmp_path: Path) -> None:
    family, keys = TWICE[case]
    contents = {"model_type": family, **({} if family == "bailing_hybrid" else SIZES), **keys}
    theirs = library_config(contents, tmp_path)
    args = arguments(contents)
    expected = plain_config(theirs)
    for key, value in plain_config(configuration(args)).items():
        if not key.endswith("_token_id") and key not in ("dtype", "_name_or_path"):
            assert value == expected[key], key
    assert args.architecture == theirs.model_type
    assert arguments(json.loads(json.dumps(from_args(args)))).architecture == args.architecture


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "two names of a key": ({"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8}, "num_experts is 4, but"),
    "layers and their types": ({"model_type": "qwen2", "layer_types": ["full_attention"]}, r"num_hidden_layers. \(2\) must"),
    "a theta that is not read": ({"model_type": "gpt_neox", "rope_theta": 77.0}, r"rope_theta is 77\.0, which transformers"),
    "a table that is not read": (
        {"model_type": "cohere2_moe", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        r"rope_scaling\.factor is 4\.0, which transformers does not read",
    ),
    "a table of layers that are not there": (
        {"model_type": "llama", "rope_scaling": {"full_attention": {"rope_type": "default", "rope_theta": 77.0}}},
        r"rope_scaling\.full_attention is a table of layers of this type",
    ),
    "an inner config": (
        {"model_type": "gemma3", "tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
        "text_config: it is a model of several modalities",
    ),
    "a word that stands for null": ({"model_type": "llama", "hidden_act": "none"}, "hidden_act"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_is_refused_by_name(case: str) -> None:
    contents, why = CONTRADICTIONS[case]
    with pytest.raises(ValueError, match=why):
        arguments({**SIZES, **contents})


def test_a_recipes_theta_that_the_family_does_not_read_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.args\.config\.rope_theta: is 77\.0, which transformers does not read"):
        configuration(HFArgs(architecture="gpt_neox", config={"rope_theta": 77.0}))


def test_a_file_that_is_not_causal_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mask of attention .* is not causal"):
        to_args({**SIZES, "model_type": "qwen2", "is_causal": False})


def test_every_architecture_reads_its_own_default_file_again(tmp_path: Path) -> None:
    """What the library writes of a default config, Titan reads as the library does, or refuses with words."""
    read = 0
    for architecture in architectures():
        with suppress(ValueError, OSError):
            default = library_config({"model_type": architecture}, tmp_path)
            if default is not None:
                args = arguments(json.loads(json.dumps(plain_config(default))))
                assert args.architecture == type(default).model_type
                read += 1
    assert read > 150
