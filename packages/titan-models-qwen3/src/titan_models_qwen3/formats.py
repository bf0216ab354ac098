"""Hugging Face's ``Qwen3ForCausalLM``. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_core.api import ForeignTensor
from titan_core.toolkit.text import show
from titan_models_qwen3.config import Qwen3Args
from titan_models_qwen3.layout import all_blocks
from titan_nn import hf_decoder
from titan_nn.hf_config import (
    WITHOUT_EFFECT,
    count,
    flag,
    require_known,
    require_plain,
    rope_parameters,
    unused_notes,
)

OF_A_LAYER = {
    **hf_decoder.OF_A_LAYER,
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
IGNORED = {*WITHOUT_EFFECT, "sliding_window", "max_window_layers"}
"""Keys that do not change what ``Qwen3ForCausalLM`` computes from its weights in evaluation mode; those of windows while
``use_sliding_window`` is false, and true is refused."""
ATTENTION = ("use_sliding_window", "layer_types")
"""Keys that :func:`require_full_attention` reads."""
MTP = "num_nextn_predict_layers"
"""DeepSeek-V3's key of ``n_mtp_layers``."""
_FULL = "full_attention"


def hf_tensors(args: Qwen3Args) -> list[ForeignTensor]:
    """Return the tensors of ``Qwen3ForCausalLM``."""
    return [*hf_decoder.hf_tensors(all_blocks(args), OF_A_LAYER), *mtp_tensors(args)]


def mtp_tensors(args: Qwen3Args) -> list[ForeignTensor]:
    """Return what blocks of multi-token prediction have in addition, by DeepSeek-V3's names. Its files, and those of
    GLM-4.5, repeat embedding and head in each block."""
    tensors, head = [], "tok_embeddings.weight" if args.tie_embeddings else "output.weight"
    for depth, index in enumerate(range(args.n_layers, args.num_blocks)):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        names = {f"{part}.weight": f"{ours}.{part}.weight" for part in ("enorm", "hnorm", "eh_proj")}
        names["shared_head.norm.weight"] = f"norm.mtp.{depth}.weight"
        tensors += [ForeignTensor(f"{theirs}.{name}", parameter) for name, parameter in names.items()]
        copies = {"embed_tokens.weight": "tok_embeddings.weight", "shared_head.head.weight": head}
        tensors += [ForeignTensor(f"{theirs}.{name}", original, copy=True) for name, original in copies.items()]
    return tensors


def hf_config(args: Qwen3Args) -> dict[str, Any]:
    """Return the contents of ``config.json`` with the keys of transformers 4, which version 5 also reads."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **hf_decoder.written_sizes(args),
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": args.n_layers,
        **({MTP: args.n_mtp_layers} if args.n_mtp_layers else {}),
    }


def hf_notes(config: Mapping[str, Any]) -> list[str]:
    """Return one line for each difference between a ``config.json`` and :class:`Qwen3Args` that does not change what the
    weights compute."""
    return unused_notes(config, IGNORED)


def hf_args(config: Mapping[str, Any]) -> Qwen3Args:
    """Return the model that a ``config.json`` of transformers 4 or 5 describes.

    Raises:
        KeyError: A key is missing. So is ``head_dim``, which does not follow from the other sizes.
        ValueError: It is not a Qwen3 model, has a feature that this model lacks, or a value is wrong.
    """
    require_type(config, "qwen3")
    require_full_attention(config)
    known = {*hf_decoder.SIZES, *IGNORED, *ATTENTION, MTP}
    require_known(config, "Qwen3ForCausalLM", known)
    return Qwen3Args(**read_sizes(config))


def require_type(config: Mapping[str, Any], model_type: str) -> None:
    """Require a ``config.json`` of this architecture.

    Raises:
        ValueError: it is of another one.
    """
    if config.get("model_type") != model_type:
        raise ValueError(f"model_type is {show(config.get('model_type'))}, not {model_type!r}")


def require_full_attention(config: Mapping[str, Any]) -> None:
    """Refuse windows and biases, which the models of this package lack.

    Raises:
        ValueError: names the key.
    """
    require_plain(config, ("attention_bias",))
    if flag(config, "use_sliding_window"):
        raise ValueError("use_sliding_window is true, and this model attends to all earlier positions")
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == _FULL for kind in kinds)):
        raise ValueError(f"layer_types is {show(kinds)}, and this model has only layers of {_FULL!r}")
    if kinds is not None and len(kinds) != config.get("num_hidden_layers"):
        raise ValueError(
            f"layer_types has {len(kinds)} layers, and num_hidden_layers is {show(config.get('num_hidden_layers'))}"
        )


def read_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of :class:`Qwen3Args` that a ``config.json`` states. Raises as :func:`hf_args`."""
    sizes = hf_decoder.read_sizes(config)
    theta = rope_parameters(config, {"default": ()})["rope_theta"]
    depths = 0 if config.get(MTP) in (None, 0) else count(config, MTP)
    return {**sizes, "head_dim": count(config, "head_dim"), "rope_theta": theta, "n_mtp_layers": depths}
