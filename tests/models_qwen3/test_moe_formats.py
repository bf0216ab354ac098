"""Models with experts from the config files of Hugging Face, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from titan_core.api import UserError
from titan_models_qwen3.moe_config import FLAVORS, Qwen3MoEArgs
from titan_models_qwen3.moe_formats import hf_args, hf_config, hf_notes, hf_tensors
from titan_models_qwen3.moe_model import Qwen3MoE

COMMON = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 40960, "mlp_only_layers": [], "model_type": "qwen3_moe", "norm_topk_prob": True,
    "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4, "output_router_logits": False,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
PUBLISHED = {"30B-A3B": (2048, 48, 32, 6144, 768), "235B-A22B": (4096, 94, 64, 12288, 1536)}
"""Width, layers, query heads, dense and expert width in the published ``config.json``."""


def published(flavor: str) -> dict[str, Any]:
    width, layers, heads, dense, inner = PUBLISHED[flavor]
    return COMMON | {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": dense,
        "moe_intermediate_size": inner, "max_window_layers": layers,
    }  # fmt: skip


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_published_configs_are_the_flavors(flavor: str) -> None:
    assert hf_args(published(flavor)) == FLAVORS[flavor]
    (note,) = hf_notes(published(flavor))
    assert "router_aux_loss_coef" in note


@pytest.mark.parametrize("change", [{}, {"n_dense_layers": 2, "norm_weights": False}], ids=["flavor", "dense layers"])
def test_a_written_config_is_read_as_the_same_model_here_and_by_the_library(tmp_path: Path, change: dict[str, Any]) -> None:
    args = FLAVORS["debug"].model_copy(update=change)
    written = json.loads(json.dumps(hf_config(args)))
    assert hf_args(written) == args
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(config) is transformers.Qwen3MoeConfig
    config.save_pretrained(tmp_path)  # with the keys of version 5
    again = json.loads((tmp_path / "config.json").read_text())
    assert again != written
    assert hf_args(again) == args


def test_weights_of_experts_are_not_normed_unless_the_file_says_so() -> None:
    config = published("30B-A3B")
    del config["norm_topk_prob"]
    assert not hf_args(config).norm_weights


@pytest.mark.parametrize("dense", [0, 1])
def test_every_parameter_has_its_tensors(dense: int) -> None:
    args = FLAVORS["debug"].model_copy(update={"n_dense_layers": dense})
    with torch.device("meta"):
        parameters = dict(Qwen3MoE(args).named_parameters())
    declared = {tensor.parameter: tensor for tensor in hf_tensors(args)}
    assert declared.keys() == parameters.keys()
    for name, tensor in declared.items():
        if "experts" in name:
            assert sum(rows for _, rows in tensor.pieces) == parameters[name].shape[0] * parameters[name].shape[1]
            first, *_, last = tensor.names
            assert ".experts.0." in first and ".experts.7." in last


def test_the_names_of_deepseek_v3() -> None:
    args = FLAVORS["debug"].model_copy(update={"choice_bias": True, "n_shared_experts": 1, "n_dense_layers": 3})
    with torch.device("meta"):
        saved = Qwen3MoE(args).state_dict()
    tensors = {tensor.name: tensor for tensor in hf_tensors(args)}
    bias = tensors["model.layers.3.mlp.gate.e_score_correction_bias"]
    assert bias.buffer and bias.parameter == "layers.3.feed_forward.router.choice.bias"
    assert tensors["model.layers.3.mlp.shared_experts.up_proj.weight"].parameter == "layers.3.feed_forward.shared.w3.weight"
    assert {tensor.parameter for tensor in tensors.values()} == saved.keys()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dense": ({"model_type": "qwen3"}, "model_type is \"qwen3\", not 'qwen3_moe'"),
    "a classifier": ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "and this model is Qwen3MoeForCausalLM"),
    "a window": ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window is true, and this model attends"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is \"yarn\", .* supports only 'default'"),
    "every second layer": ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, and in this model all layers but"),
    "a dense layer within": ({"mlp_only_layers": [0, 3]}, r"mlp_only_layers is \[.*\], and in this model only the first"),
    "a loss of the routers": ({"output_router_logits": True}, "output_router_logits is true, and adds a loss"),
    "shared experts": ({"n_shared_experts": 1}, "n_shared_experts is 1, and this model does not know what that means"),
    "two numbers of experts": ({"num_local_experts": 4}, "num_experts is 128 and num_local_experts is 4, and both are"),
    "no experts": ({"num_experts": 0}, "num_experts is 0, not a whole number above 0"),
    "too few experts": ({"num_experts": 4}, "experts_per_token 8 exceeds the 4 experts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_model_does_not_compute_is_refused(case: str) -> None:
    change, why = WRONG[case]
    with pytest.raises(ValueError, match=why):
        hf_args(published("30B-A3B") | change)


@pytest.mark.parametrize(
    ("change", "why"),
    [({"scoring": "sigmoid"}, 'is "sigmoid", and Qwen3MoeForCausalLM has "softmax"'), ({"weight_scale": 2.5}, "is 2.5")],
)
def test_what_the_library_does_not_compute_is_not_written(change: dict[str, Any], why: str) -> None:
    args: Qwen3MoEArgs = FLAVORS["debug"].model_copy(update=change)
    with pytest.raises(UserError, match=why):
        hf_config(args)
