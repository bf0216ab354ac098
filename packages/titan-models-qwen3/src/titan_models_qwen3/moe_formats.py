"""Hugging Face's ``Qwen3MoeForCausalLM``. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_core.api import ForeignTensor, UserError
from titan_core.toolkit.text import show
from titan_models_qwen3.formats import (
    ATTENTION,
    IGNORED,
    MTP,
    hf_config as dense_config,
    hf_tensors as dense_tensors,
    read_sizes,
    require_full_attention,
    require_type,
)
from titan_models_qwen3.moe_config import Qwen3MoEArgs
from titan_nn import hf_decoder
from titan_nn.hf_config import count, flag, require_known, unused_notes

_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_SIZES = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step",
    "mlp_only_layers", "num_local_experts",
)  # fmt: skip
_LOSSES = ("router_aux_loss_coef", "output_router_logits")
"""Keys of a loss that the library adds to the objective in training if it is requested."""
_OF_DEEPSEEK: dict[str, object] = {
    "n_shared_experts": 0, "scoring": "softmax", "choice_bias": False, "n_groups": 1, "n_chosen_groups": 1,
    "weight_scale": 1.0,
}  # fmt: skip
"""Arguments that the library's model lacks, and their values there."""


def hf_tensors(args: Qwen3MoEArgs) -> list[ForeignTensor]:
    """Return the tensors of the files: one for each matrix of each expert, the names of DeepSeek-V3 for what
    ``Qwen3MoeForCausalLM`` lacks."""
    tensors = []
    for tensor in dense_tensors(args):
        _, _, path = tensor.parameter.partition("layers.")
        layer, _, name = path.partition(".")
        if not name.startswith("feed_forward.") or int(layer) < args.n_dense_layers:
            tensors.append(tensor)
    for index in range(args.n_dense_layers, args.num_blocks):
        tensors += _of_experts(args, f"model.layers.{index}.mlp", f"layers.{index}.feed_forward")
    return tensors


def _of_experts(args: Qwen3MoEArgs, theirs: str, ours: str) -> list[ForeignTensor]:
    tensors = [ForeignTensor(f"{theirs}.gate.weight", f"{ours}.router.weight")]
    if args.choice_bias:
        name = f"{theirs}.gate.e_score_correction_bias"
        tensors.append(ForeignTensor(name, f"{ours}.router.choice.bias", buffer=True))
    for leaf, projection in _EXPERTS.items():
        rows = args.dim if leaf == "w2" else args.expert_dim
        names = [f"{theirs}.experts.{expert}.{projection}.weight" for expert in range(args.n_experts)]
        tensors.append(
            ForeignTensor(
                f"{theirs}.experts.*.{projection}", f"{ours}.experts.{leaf}", pieces=tuple((n, rows) for n in names)
            )
        )
        if args.n_shared_experts:
            tensors.append(ForeignTensor(f"{theirs}.shared_experts.{projection}.weight", f"{ours}.shared.{leaf}.weight"))
    return tensors


def hf_config(args: Qwen3MoEArgs) -> dict[str, Any]:
    """Return the contents of ``config.json`` with the keys of transformers 4, which version 5 also reads.

    Raises:
        UserError: the library's model does not compute what this one does.
    """
    ours = args.model_dump()
    for name, value in _OF_DEEPSEEK.items():
        if ours[name] != value:
            why = f"is {show(ours[name])}, and Qwen3MoeForCausalLM has {show(value)}"
            raise UserError.one(f"model.args.{name}", why, "keep the checkpoint in Titan's format")
    return {
        **dense_config(args),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": args.n_experts,
        "num_experts_per_tok": args.experts_per_token,
        "moe_intermediate_size": args.expert_dim,
        "norm_topk_prob": args.norm_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(args.n_dense_layers)),
    }


def hf_notes(config: Mapping[str, Any]) -> list[str]:
    """Return one line for each difference between a ``config.json`` and :class:`Qwen3MoEArgs` that does not change what the
    weights compute."""
    return unused_notes(config, {*IGNORED, *_LOSSES})


def hf_args(config: Mapping[str, Any]) -> Qwen3MoEArgs:
    """Return the model that a ``config.json`` of transformers 4 or 5 describes.

    Raises:
        KeyError: A key is missing. So is ``head_dim``, which does not follow from the other sizes.
        ValueError: It is not a Qwen3 model with experts, has a feature that this model lacks, or a value is wrong.
    """
    require_type(config, "qwen3_moe")
    require_full_attention(config)
    require_known(config, "Qwen3MoeForCausalLM", {*hf_decoder.SIZES, *IGNORED, *ATTENTION, *_SIZES, *_LOSSES, MTP})
    if flag(config, "output_router_logits"):
        raise ValueError("output_router_logits is true, and adds a loss of the routers, which is not the objective")
    names = [name for name in ("num_experts", "num_local_experts") if name in config] or ["num_experts"]
    if config[names[0]] != config[names[-1]]:
        shown = " and ".join(f"{name} is {show(config[name])}" for name in names)
        raise ValueError(f"{shown}, and both are names of the number of experts")
    return Qwen3MoEArgs(
        **read_sizes(config),
        n_dense_layers=_dense_layers(config),
        n_experts=count(config, names[0]),
        experts_per_token=count(config, "num_experts_per_tok"),
        expert_dim=count(config, "moe_intermediate_size"),
        norm_weights=flag(config, "norm_topk_prob"),
    )


def _dense_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers without experts, which must be the first ones."""
    step = 1 if config.get("decoder_sparse_step") is None else count(config, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if step != 1:
        raise ValueError(f"decoder_sparse_step is {step}, and in this model all layers but the first ones have experts")
    if dense != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers is {show(dense)}, and in this model only the first layers have no experts")
    return len(dense)
