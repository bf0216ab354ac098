"""Llama's weights elsewhere: Hugging Face's ``LlamaForCausalLM``, and the files that Meta publishes. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_core.weights import ForeignTensor
from titan_models_llama.config import LlamaArgs, RopeScaling

_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def hf_tensors(args: LlamaArgs) -> list[ForeignTensor]:
    """Names of ``LlamaForCausalLM``. It turns feature ``i`` of a head with feature ``i + head_dim / 2``, and this model, as
    Meta's, ``2 i`` with ``2 i + 1``: the rows that make queries and keys are ordered otherwise within each head."""
    pairs = range(args.head_dim // 2)
    order = tuple(row for pair in pairs for row in (pair, pair + args.head_dim // 2))
    tensors = [ForeignTensor("model.embed_tokens.weight", "tok_embeddings.weight")]
    for layer in range(args.n_layers):
        for ours, theirs in _LAYER.items():
            rows = order if ours in ("attention.wq", "attention.wk") else ()
            tensors.append(ForeignTensor(f"model.layers.{layer}.{theirs}.weight", f"layers.{layer}.{ours}.weight", rows))
    tensors.append(ForeignTensor("model.norm.weight", "norm.weight"))
    if args.tie_embeddings:
        tensors.append(ForeignTensor("lm_head.weight", "tok_embeddings.weight", copy=True))
    else:
        tensors.append(ForeignTensor("lm_head.weight", "output.weight"))
    return tensors


def hf_config(args: LlamaArgs) -> dict[str, Any]:
    """``config.json``, in the words of transformers 4, which 5 understands too."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": args.tie_embeddings,
        "attention_bias": False,
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


def hf_args(config: Mapping[str, Any]) -> LlamaArgs:
    """The model that a ``config.json`` describes, of transformers 4 or 5.

    Raises:
        ValueError: it is no Llama, or one with what this model has not.
    """
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type is {config.get('model_type')!r}, not 'llama'")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ValueError(f"{key} is true, and this Llama has no biases")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {config['hidden_act']!r}, and this Llama has 'silu'")
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    if config.get("head_dim") not in (None, dim // heads):
        raise ValueError(f"head_dim is {config['head_dim']}, and this Llama's is hidden_size / heads = {dim // heads}")
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key), Mapping | None):
            raise ValueError(f"{key} is {config[key]!r}, and should be a table")
    if not isinstance(config.get("tie_word_embeddings", False), bool):
        raise ValueError(f"tie_word_embeddings is {config['tie_word_embeddings']!r}")
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor is {partial!r}, and this Llama turns whole heads")
    return LlamaArgs(
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads") or heads,
        ffn_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_seq_len=config["max_position_embeddings"],
        rope_theta=_real(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        rope_scaling=_scaling(scaling),
        norm_eps=_real(config["rms_norm_eps"]),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    kind = config.get("rope_type", config.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type is {kind!r}, and this Llama knows 'llama3' alone")
    return RopeScaling(
        factor=_real(config["factor"]),
        low_freq_factor=_real(config["low_freq_factor"]),
        high_freq_factor=_real(config["high_freq_factor"]),
        original_max_seq_len=config["original_max_position_embeddings"],
    )


def _real(value: Any) -> float:
    """A number, and neither a text nor a truth value that would pass for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} should be a number")
    return float(value)


def meta_tensors(args: LlamaArgs) -> list[ForeignTensor]:
    """Meta's names are this model's; its larger models are divided over files as tensor parallelism divides them."""
    tensors = [ForeignTensor("tok_embeddings.weight", "tok_embeddings.weight", split=0)]
    for layer in range(args.n_layers):
        for name in _LAYER:
            split = None if name.endswith("norm") else 1 if name in ("attention.wo", "feed_forward.w2") else 0
            full = f"layers.{layer}.{name}.weight"
            tensors.append(ForeignTensor(full, full, split=split))  # type: ignore[arg-type]
    tensors.append(ForeignTensor("norm.weight", "norm.weight"))
    if args.tie_embeddings:
        tensors.append(ForeignTensor("output.weight", "tok_embeddings.weight", split=0, copy=True))
    else:
        tensors.append(ForeignTensor("output.weight", "output.weight", split=0))
    return tensors


def meta_args(params: Mapping[str, Any]) -> LlamaArgs:
    """The model that a ``params.json`` describes.

    Raises:
        ValueError: what a Llama 3 has is not there.
    """
    dim = params["dim"]
    hidden = int(2 * (4 * dim) / 3)
    if params.get("ffn_dim_multiplier"):
        hidden = int(params["ffn_dim_multiplier"] * hidden)
    multiple = params["multiple_of"]
    scaled = bool(params.get("use_scaled_rope", False))
    if params["vocab_size"] <= 0:
        raise ValueError("vocab_size is left to the tokenizer, as in Llama 2")
    return LlamaArgs(
        dim=dim,
        n_layers=params["n_layers"],
        n_heads=params["n_heads"],
        n_kv_heads=params.get("n_kv_heads") or params["n_heads"],
        ffn_dim=-(-hidden // multiple) * multiple,
        vocab_size=params["vocab_size"],
        max_seq_len=131_072 if scaled else 8192,
        rope_theta=float(params.get("rope_theta", 10_000.0)),
        rope_scaling=RopeScaling(factor=float(params.get("rope_scaling_factor", 8.0))) if scaled else None,
        norm_eps=float(params["norm_eps"]),
    )
