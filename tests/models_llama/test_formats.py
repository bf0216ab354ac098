"""Models from the config files of Hugging Face and Meta."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from titan_models_llama.config import FLAVORS, LlamaArgs, RopeScaling
from titan_models_llama.formats import hf_args, hf_config, hf_tensors, meta_args, meta_tensors
from titan_models_llama.model import Llama

COMMON = {"vocab_size": 128_256, "norm_eps": 1e-5, "rope_theta": 500_000.0, "use_scaled_rope": True}
PARAMS: dict[str, dict[str, Any]] = {
    "1B": {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.5, "multiple_of": 256},
    "3B": {"dim": 3072, "n_layers": 28, "n_heads": 24, "n_kv_heads": 8, "ffn_dim_multiplier": 1.0, "multiple_of": 256},
    "8B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
    "70B": {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 4096},
    "405B": {"dim": 16384, "n_layers": 126, "n_heads": 128, "n_kv_heads": 8, "ffn_dim_multiplier": 1.2, "multiple_of": 4096},
}
"""Meta's published ``params.json`` files of Llama 3.1 and 3.2."""


@pytest.mark.parametrize("flavor", PARAMS)
def test_metas_published_sizes_are_the_flavors(flavor: str) -> None:
    assert meta_args(PARAMS[flavor] | COMMON) == FLAVORS[flavor]


@pytest.mark.parametrize("flavor", [name for name in FLAVORS if name != "debug"])
def test_a_written_config_is_read_as_the_same_model(flavor: str) -> None:
    assert hf_args(json.loads(json.dumps(hf_config(FLAVORS[flavor])))) == FLAVORS[flavor]


def test_an_unpublished_size_needs_the_rope_factor() -> None:
    other = PARAMS["1B"] | COMMON | {"n_layers": 4}
    with pytest.raises(ValueError, match="use_scaled_rope is true without rope_scaling_factor"):
        meta_args(other)
    scaled = meta_args(other | {"rope_scaling_factor": 32})
    assert scaled.rope_scaling == RopeScaling(factor=32.0)
    assert not scaled.tie_embeddings
    assert meta_args(other | {"use_scaled_rope": False}).rope_scaling is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"dim": "2048"}, 'dim is "2048", not a whole number above 0'),
    "zero": ({"n_heads": 0}, "n_heads is 0, not a whole number above 0"),
    "list": ({"ffn_dim_multiplier": [1]}, r"ffn_dim_multiplier is \[1\], not a number above 0"),
    "not finite": ({"norm_eps": float("inf")}, "norm_eps is Infinity, not a number above 0"),
    "flag": ({"use_scaled_rope": "no"}, 'use_scaled_rope is "no", not true or false'),
    "quantised": (
        {"quantization_args": {"scheme": "int8"}, "lora_args": {"rank": 16}},
        "does not support lora_args, quantization_args",
    ),
    "Llama 2": ({"vocab_size": -1}, "vocab_size is -1, as in Llama 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_params_are_refused(case: str) -> None:
    change, why = WRONG[case]
    with pytest.raises(ValueError, match=why):
        meta_args(PARAMS["1B"] | COMMON | change)


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("value", ["x", 0, -1, 1.5, None, [1], {"a": 1}, True], ids=str)
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"])
def test_a_config_with_wrong_types_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} is .*, not a whole number above 0"):
        hf_args(hf_config(FLAVORS["1B"]) | {key: value})


SCALINGS: dict[str, tuple[Any, str]] = {
    "text": ("llama3", 'rope_scaling is "llama3", not an object'),
    "another": ({"rope_type": "yarn"}, 'rope_type is "yarn"'),
    "no factor": ({"rope_type": "llama3"}, "'factor'"),
    "no number": ({"rope_type": "llama3", "factor": "8"}, 'factor is "8", not a number above 0'),
}


@pytest.mark.parametrize("case", SCALINGS)
def test_an_unsupported_rope_scaling_is_refused(case: str) -> None:
    scaling, why = SCALINGS[case]
    with pytest.raises((ValueError, KeyError), match=why):
        hf_args(hf_config(FLAVORS["1B"]) | {"rope_scaling": scaling})


def shapes(args: LlamaArgs) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Llama(args).named_parameters()}


def test_hugging_faces_names_and_order_of_rows() -> None:
    """With heads of four features, it pairs features 0 and 2, and 1 and 3."""
    args = FLAVORS["debug"].model_copy(update={"dim": 16, "n_heads": 4})
    block = {
        tensor.parameter.removeprefix("layers.5."): (tensor.name.removeprefix("model.layers.5."), tensor.rows)
        for tensor in hf_tensors(args)
        if tensor.parameter.startswith("layers.5.")
    }
    assert block == {
        "attention.wq.weight": ("self_attn.q_proj.weight", (0, 2, 1, 3)),
        "attention.wk.weight": ("self_attn.k_proj.weight", (0, 2, 1, 3)),
        "attention.wv.weight": ("self_attn.v_proj.weight", ()),
        "attention.wo.weight": ("self_attn.o_proj.weight", ()),
        "feed_forward.w1.weight": ("mlp.gate_proj.weight", ()),
        "feed_forward.w2.weight": ("mlp.down_proj.weight", ()),
        "feed_forward.w3.weight": ("mlp.up_proj.weight", ()),
        "attention_norm.weight": ("input_layernorm.weight", ()),
        "ffn_norm.weight": ("post_attention_layernorm.weight", ()),
    }


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("attention_bias", True, "attention_bias is true, and this model has no biases"),
        ("mlp_bias", True, "mlp_bias is true, and this model has no biases"),
        ("sliding_window", 4096, "sliding_window is 4096, and this model does not know what that means"),
    ],
)
def test_a_config_of_another_model_is_refused(key: str, value: Any, why: str) -> None:
    assert hf_args(hf_config(FLAVORS["1B"]) | {key: None}) == FLAVORS["1B"]
    with pytest.raises(ValueError, match=why):
        hf_args(hf_config(FLAVORS["1B"]) | {key: value})


def test_keys_that_older_and_newer_configs_lack_or_repeat() -> None:
    config = hf_config(FLAVORS["1B"])
    del config["num_key_value_heads"]  # before grouped queries
    assert hf_args(config).n_kv_heads == FLAVORS["1B"].n_heads
    rope = {"rope_type": "default", "rope_theta": 20_000.0}  # transformers 5
    assert hf_args(config | {"rope_scaling": None, "rope_parameters": rope}).rope_theta == 20_000.0
    del config["rope_theta"]
    assert hf_args(config).rope_theta == 10_000.0


def test_both_formats_name_the_copy_of_a_tied_weight() -> None:
    for tied in (True, False):
        args = FLAVORS["debug"].model_copy(update={"tie_embeddings": tied})
        for tensors, name in ((hf_tensors(args), "lm_head.weight"), (meta_tensors(args), "output.weight")):
            (last,) = (tensor for tensor in tensors if tensor.name == name)
            assert last.copy == tied
            assert (last.parameter == "tok_embeddings.weight") == tied
