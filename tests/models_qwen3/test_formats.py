"""Models from the config files of Hugging Face, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from harness.rope_spellings import KINDS, SIZES, read_and_written
from titan_models_qwen3.config import FLAVORS
from titan_models_qwen3.formats import hf_args, hf_config, hf_notes, hf_tensors
from titan_models_qwen3.model import Qwen3, rope_table

COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 40960, "model_type": "qwen3", "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
PUBLISHED: dict[str, tuple[int, int, int, int, bool]] = {
    "0.6B": (1024, 28, 16, 3072, True),
    "1.7B": (2048, 28, 16, 6144, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12288, False),
    "14B": (5120, 40, 40, 17408, False),
    "32B": (5120, 64, 64, 25600, False),
}
"""Width, layers, query heads, feed-forward width and whether the embedding is tied, in the published ``config.json``."""


def published(flavor: str) -> dict[str, Any]:
    width, layers, heads, inner, tied = PUBLISHED[flavor]
    return COMMON | {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
        "max_window_layers": layers, "tie_word_embeddings": tied,
    }  # fmt: skip


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_published_configs_are_the_flavors(flavor: str) -> None:
    assert hf_args(published(flavor)) == FLAVORS[flavor]
    (note,) = hf_notes(published(flavor))
    assert note.startswith("not used: initializer_range, max_window_layers, ")


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_written_config_is_read_as_the_same_model_here_and_by_the_library(tmp_path: Path, flavor: str) -> None:
    args = FLAVORS[flavor]
    written = json.loads(json.dumps(hf_config(args)))
    assert hf_args(written) == args
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(config) is transformers.Qwen3Config
    config.save_pretrained(tmp_path)  # with the keys of version 5
    again = json.loads((tmp_path / "config.json").read_text())
    assert again != written
    assert hf_args(again) == args


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_the_library(tied: bool) -> None:
    args = FLAVORS["debug"].model_copy(update={"tie_embeddings": tied})
    with torch.device("meta"):
        ours = {name: parameter.shape for name, parameter in Qwen3(args).named_parameters()}
        config = transformers.Qwen3Config(**{key: value for key, value in hf_config(args).items() if value is not None})
        theirs = {name: tensor.shape for name, tensor in transformers.Qwen3ForCausalLM(config).state_dict().items()}
    assert {one.name: ours[one.parameter] for one in hf_tensors(args)} == theirs
    assert {one.parameter for one in hf_tensors(args)} == ours.keys()
    (head,) = (one for one in hf_tensors(args) if one.name == "lm_head.weight")
    assert head.copy == tied


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_type": "qwen2"}, "model_type is \"qwen2\", not 'qwen3'"),
    "a classifier": ({"architectures": ["Qwen3ForSequenceClassification"]}, "and this model is Qwen3ForCausalLM"),
    "biases": ({"attention_bias": True}, "attention_bias is true, and this model has no biases"),
    "a window": ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window is true, and this model attends"),
    "a layer with a window": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        r"layer_types is \[.*\], and this model has only layers of 'full_attention'",
    ),
    "layers of another number": ({"layer_types": ["full_attention"]}, "has 1 layers, and num_hidden_layers is 36"),
    "not causal": ({"is_causal": False}, "is_causal is false, and positions of this model"),
    "layers of a wrong type": ({"layer_types": "full_attention"}, "layer_types is .*, and this model has only layers of"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is \"yarn\", .* supports only 'default'"),
    "yarn of version 5": ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type is "yarn"'),
    "a factor without its kind": ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor is 4.0, and this model does not"),
    "half of the heads' features": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and this model rotates"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is \"gelu\", and this model supports only 'silu'"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config is .*, and this model does not know"),
    "odd heads": ({"head_dim": 127}, "head_dim 127 must be even"),
    "heads of a wrong type": ({"head_dim": None}, "head_dim is null, not a whole number above 0"),
    "text": ({"use_sliding_window": "no"}, 'use_sliding_window is "no", not true or false'),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_model_does_not_compute_is_refused(case: str) -> None:
    change, why = WRONG[case]
    with pytest.raises(ValueError, match=why):
        hf_args(published("8B") | change)


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads"])
def test_a_key_whose_default_is_no_other_size_is_required(key: str) -> None:
    config = published("8B")
    del config[key]
    with pytest.raises(KeyError, match=key):
        hf_args(config)


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("kind", KINDS)
def test_rotation_is_read_and_written_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    base = {"model_type": "qwen3", **SIZES}
    fewest = 78 if kind == "default" else 0
    assert fewest <= read_and_written(kind, base, tmp_path, hf_args, hf_config, rope_table) <= 140 * (fewest > 0)


def test_a_window_that_is_off_has_no_effect() -> None:
    assert hf_args(published("8B") | {"sliding_window": 4096, "max_window_layers": 3}) == FLAVORS["8B"]


def test_dropout_is_a_note() -> None:
    config = published("8B") | {"attention_dropout": 0.1}
    assert hf_args(config) == FLAVORS["8B"]
    assert hf_notes(config)[0] == "attention_dropout is 0.1, but this model trains without dropout"
