"""Other formats of Llama's weights: Hugging Face's ``LlamaForCausalLM``, Meta's published files, and TorchTitan's
checkpoints. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan_core.api import ForeignTensor
from titan_core.toolkit.text import shorten, show
from titan_models_llama.config import FLAVORS, LlamaArgs, RopeScaling
from titan_nn import hf_decoder
from titan_nn.hf_config import (
    WITHOUT_EFFECT,
    count,
    flag,
    number,
    require_known,
    require_plain,
    rope_parameters,
    unused_notes,
)


def hf_tensors(args: LlamaArgs) -> list[ForeignTensor]:
    """Return the tensors of ``LlamaForCausalLM``.

    RoPE there pairs feature ``i`` of a head with ``i + head_dim / 2``; this model, like Meta's, pairs ``2 i`` with
    ``2 i + 1``. So the rows of the query and key projections differ in order within each head.
    """
    pairs = range(args.head_dim // 2)
    order = tuple(row for pair in pairs for row in (pair, pair + args.head_dim // 2))
    return hf_decoder.hf_tensors(args, rows={"attention.wq": order, "attention.wk": order})


def hf_config(args: LlamaArgs) -> dict[str, Any]:
    """Return the contents of ``config.json`` with the keys of transformers 4, which version 5 also reads."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **hf_decoder.written_sizes(args),
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "mlp_bias": False,
    }
    if args.rope_scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor,
            "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_max_seq_len,
        }
    return config


_HF_WITHOUT_EFFECT = {*WITHOUT_EFFECT, "pretraining_tp"}
"""Keys that do not change what ``LlamaForCausalLM`` computes from its weights in evaluation mode."""
_HF_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def hf_notes(config: Mapping[str, Any]) -> list[str]:
    """Return one line for each difference between a ``config.json`` and :class:`LlamaArgs` that does not change what the
    weights compute."""
    return unused_notes(config, _HF_WITHOUT_EFFECT)


def hf_args(config: Mapping[str, Any]) -> LlamaArgs:
    """Return the model that a ``config.json`` of transformers 4 or 5 describes.

    Raises:
        KeyError: A key is missing.
        ValueError: It is not a Llama model, has a feature that this model lacks, or a value is wrong.
    """
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type is {show(config.get('model_type'))}, not 'llama'")
    require_plain(config, ("attention_bias", "mlp_bias"))
    rope = rope_parameters(config, {"default": (), "llama3": _HF_SCALING})  # names another kind before its keys
    require_known(config, "LlamaForCausalLM", {*hf_decoder.SIZES, *_HF_WITHOUT_EFFECT, "mlp_bias"})
    sizes = hf_decoder.read_sizes({"num_key_value_heads": None, **config})
    head_dim = sizes["dim"] // sizes["n_heads"]
    if config.get("head_dim") not in (None, head_dim):
        raise ValueError(
            f"head_dim is {show(config['head_dim'])}, and this model supports only "
            f"hidden_size / num_attention_heads = {head_dim}"
        )
    return LlamaArgs(**sizes, rope_theta=rope["rope_theta"], rope_scaling=_scaling(rope))


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    return RopeScaling(
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_max_seq_len=count(rope, "original_max_position_embeddings"),
    )


def meta_tensors(args: LlamaArgs) -> list[ForeignTensor]:
    """Return the tensors of Meta's files. They have this model's names. Files of large models are tensor-parallel shards."""
    tensors = [ForeignTensor("tok_embeddings.weight", "tok_embeddings.weight", split=0)]
    for layer in range(args.n_layers):
        for name in hf_decoder.OF_A_LAYER:
            split = None if name.endswith("norm") else 1 if name in ("attention.wo", "feed_forward.w2") else 0
            full = f"layers.{layer}.{name}.weight"
            tensors.append(ForeignTensor(full, full, split=split))  # type: ignore[arg-type]
    tensors.append(ForeignTensor("norm.weight", "norm.weight"))
    if args.tie_embeddings:
        tensors.append(ForeignTensor("output.weight", "tok_embeddings.weight", split=0, copy=True))
    else:
        tensors.append(ForeignTensor("output.weight", "output.weight", split=0))
    return tensors


def torchtitan_tensors(args: LlamaArgs) -> list[ForeignTensor]:
    """Return the tensors of TorchTitan's checkpoints. They have this model's names, but newer versions have the projections
    of attention's input in a module ``qkv_linear``."""
    tensors = []
    for tensor in meta_tensors(args):
        aliases = tuple(
            tensor.name.replace(f"attention.{one}.", f"attention.qkv_linear.{one}.")
            for one in ("wq", "wk", "wv")
            if f".attention.{one}." in tensor.name
        )
        tensors.append(replace(tensor, split=None, aliases=aliases))
    return tensors


_META_KEYS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta",
    "use_scaled_rope", "rope_scaling_factor",
    "max_seq_len", "max_batch_size", "model_parallel_size",  # options of Meta's inference code, not of the weights
}  # fmt: skip


def meta_args(params: Mapping[str, Any]) -> LlamaArgs:
    """Return the model that a ``params.json`` describes.

    The file does not say whether the output layer is tied to the embedding nor, for Llama 3.1 and 3.2, the factor of RoPE's
    scaling. Both are known for the published sizes. Any other size that needs the factor is refused.

    Raises:
        KeyError: A key is missing.
        ValueError: A key is unknown, or a value is wrong.
    """
    unknown = sorted(key for key, value in params.items() if key not in _META_KEYS and value not in (None, False))
    if unknown:
        raise ValueError(f"this model does not support {shorten(', '.join(unknown))}")
    dim, multiple = count(params, "dim"), count(params, "multiple_of")
    hidden = int(2 * (4 * dim) / 3)
    if params.get("ffn_dim_multiplier") is not None:
        hidden = int(number(params, "ffn_dim_multiplier") * hidden)
    heads = count(params, "n_heads")
    if params["vocab_size"] == -1:
        raise ValueError("vocab_size is -1, as in Llama 2, and must be the size of the vocabulary")
    scaled = flag(params, "use_scaled_rope")
    args = LlamaArgs(
        dim=dim,
        n_layers=count(params, "n_layers"),
        n_heads=heads,
        n_kv_heads=heads if params.get("n_kv_heads") is None else count(params, "n_kv_heads"),
        ffn_dim=-(-hidden // multiple) * multiple,
        vocab_size=count(params, "vocab_size"),
        max_seq_len=131_072 if scaled else 8192,
        rope_theta=number({"rope_theta": 10_000.0, **params}, "rope_theta"),
        rope_scaling=None,
        norm_eps=number(params, "norm_eps"),
    )
    if not scaled:
        return args
    published = next((known for known in FLAVORS.values() if known.rope_scaling and _size(known) == _size(args)), None)
    if params.get("rope_scaling_factor") is not None:
        scaling = RopeScaling(factor=number(params, "rope_scaling_factor"))
    elif published is not None:
        assert published.rope_scaling is not None
        scaling = published.rope_scaling
    else:
        raise ValueError(
            "use_scaled_rope is true without rope_scaling_factor, and this is not a size of Llama 3.1 (factor 8) or 3.2 (32)"
        )
    tied = published is not None and published.tie_embeddings
    return args.model_copy(update={"rope_scaling": scaling, "tie_embeddings": tied})


def _size(args: LlamaArgs) -> tuple[int, ...]:
    """Return the arguments that distinguish the published models."""
    return args.dim, args.n_layers, args.n_heads, args.n_kv_heads, args.ffn_dim, args.vocab_size
