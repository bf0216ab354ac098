"""Other formats of Llama's weights: Hugging Face's ``LlamaForCausalLM``, Meta's published files, and TorchTitan's
checkpoints. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan_core.api import ForeignTensor
from titan_core.toolkit.sections import LARGEST
from titan_core.toolkit.text import shorten, show
from titan_models_llama.config import FLAVORS, LlamaArgs, RopeScaling

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
    """Return the tensors of ``LlamaForCausalLM``.

    RoPE there pairs feature ``i`` of a head with ``i + head_dim / 2``; this model, like Meta's, pairs ``2 i`` with
    ``2 i + 1``. So the rows of the query and key projections differ in order within each head.
    """
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
    """Return the contents of ``config.json`` with the keys of transformers 4, which version 5 also reads."""
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


_HF_KEYS = {
    "model_type", "attention_bias", "mlp_bias", "hidden_act", "num_attention_heads", "hidden_size", "head_dim",
    "rope_parameters", "partial_rotary_factor", "num_hidden_layers", "num_key_value_heads", "intermediate_size",
    "vocab_size", "max_position_embeddings", "rope_theta", "rope_scaling", "rms_norm_eps", "tie_word_embeddings",
}  # fmt: skip
_HF_IDS = {"bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "unk_token_id"}
_HF_WITHOUT_EFFECT = {
    "initializer_range", "pretraining_tp", "use_cache", "attention_dropout",  # of LlamaConfig
    "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "return_dict", "torchscript",
    "output_attentions", "output_hidden_states", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward", "id2label",
    "label2id", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class", "prefix",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids",
    "unsloth_fixed", "unsloth_version",
}  # fmt: skip
"""Keys that do not change what ``LlamaForCausalLM`` computes from its weights in evaluation mode."""
_NOTHING: tuple[object, ...] = (None, False, [], {}, "")


def hf_notes(config: Mapping[str, Any]) -> list[str]:
    """Return one line for each difference between a ``config.json`` and :class:`LlamaArgs` that does not change what the
    weights compute."""
    notes = []
    if config.get("attention_dropout"):
        notes.append(f"attention_dropout is {show(config['attention_dropout'])}, but this model trains without dropout")
    unused = sorted(key for key in config.keys() & _HF_WITHOUT_EFFECT if key != "attention_dropout")
    if unused:
        notes.append(f"not used: {', '.join(unused)}")
    return notes


def _require_known(config: Mapping[str, Any]) -> None:
    """Refuse a ``config.json`` with settings that this model may have to honour.

    Raises:
        ValueError: a key is unknown, and has a value.
    """
    architectures = config.get("architectures")
    if architectures not in (None, [], ["LlamaForCausalLM"], ["LlamaModel"]):
        raise ValueError(f"architectures is {show(architectures)}, and this model is LlamaForCausalLM")
    known = {*_HF_KEYS, *_HF_IDS, *_HF_WITHOUT_EFFECT, "architectures"}
    for key, value in config.items():
        if key not in known and value not in _NOTHING:
            raise ValueError(f"{shorten(key)} is {show(value, key)}, and this model does not know what that means")
    known_rope = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_HF_SCALING}
    for table in ("rope_scaling", "rope_parameters"):
        for key, value in _table(config, table).items():
            if key not in known_rope and value not in _NOTHING:
                raise ValueError(f"{table}.{shorten(key)} is {show(value)}, and this model does not know what that means")


_HF_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def hf_args(config: Mapping[str, Any]) -> LlamaArgs:
    """Return the model that a ``config.json`` of transformers 4 or 5 describes.

    Raises:
        KeyError: A key is missing.
        ValueError: It is not a Llama model, has a feature that this model lacks, or a value is wrong.
    """
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type is {show(config.get('model_type'))}, not 'llama'")
    for key in ("attention_bias", "mlp_bias"):
        if _flag(config, key):
            raise ValueError(f"{key} is true, and this model has no biases")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {show(config['hidden_act'])}, and this model supports only 'silu'")
    _scaling(_table(config, "rope_scaling") or _table(config, "rope_parameters"))  # names another kind before its keys
    _require_known(config)
    heads, dim = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    if config.get("head_dim") not in (None, dim // heads):
        raise ValueError(
            f"head_dim is {show(config['head_dim'])}, and this model supports only "
            f"hidden_size / num_attention_heads = {dim // heads}"
        )
    rope = _table(config, "rope_parameters")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor is {show(partial)}, and this model rotates whole heads")
    return LlamaArgs(
        dim=dim,
        n_layers=_count(config, "num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=heads if config.get("num_key_value_heads") is None else _count(config, "num_key_value_heads"),
        ffn_dim=_count(config, "intermediate_size"),
        vocab_size=_count(config, "vocab_size"),
        max_seq_len=_count(config, "max_position_embeddings"),
        rope_theta=_number({"rope_theta": 10_000.0, **config, **rope}, "rope_theta"),
        rope_scaling=_scaling(_table(config, "rope_scaling") or rope),
        norm_eps=_number(config, "rms_norm_eps"),
        tie_embeddings=_flag(config, "tie_word_embeddings"),
    )


def _scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    kind = config.get("rope_type", config.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type is {show(kind)}, and this model supports only 'default' and 'llama3'")
    return RopeScaling(
        factor=_number(config, "factor"),
        low_freq_factor=_number(config, "low_freq_factor"),
        high_freq_factor=_number(config, "high_freq_factor"),
        original_max_seq_len=_count(config, "original_max_position_embeddings"),
    )


def meta_tensors(args: LlamaArgs) -> list[ForeignTensor]:
    """Return the tensors of Meta's files. They have this model's names. Files of large models are tensor-parallel shards."""
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
    dim, multiple = _count(params, "dim"), _count(params, "multiple_of")
    hidden = int(2 * (4 * dim) / 3)
    if params.get("ffn_dim_multiplier") is not None:
        hidden = int(_number(params, "ffn_dim_multiplier") * hidden)
    heads = _count(params, "n_heads")
    if params["vocab_size"] == -1:
        raise ValueError("vocab_size is -1, as in Llama 2, and must be the size of the vocabulary")
    scaled = _flag(params, "use_scaled_rope")
    args = LlamaArgs(
        dim=dim,
        n_layers=_count(params, "n_layers"),
        n_heads=heads,
        n_kv_heads=heads if params.get("n_kv_heads") is None else _count(params, "n_kv_heads"),
        ffn_dim=-(-hidden // multiple) * multiple,
        vocab_size=_count(params, "vocab_size"),
        max_seq_len=131_072 if scaled else 8192,
        rope_theta=_number({"rope_theta": 10_000.0, **params}, "rope_theta"),
        rope_scaling=None,
        norm_eps=_number(params, "norm_eps"),
    )
    if not scaled:
        return args
    published = next((known for known in FLAVORS.values() if known.rope_scaling and _size(known) == _size(args)), None)
    if params.get("rope_scaling_factor") is not None:
        scaling = RopeScaling(factor=_number(params, "rope_scaling_factor"))
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


def _count(config: Mapping[str, Any], key: str) -> int:
    """Return the positive whole number ``config[key]``.

    Raises:
        KeyError: ``key`` is missing.
        ValueError: The value is anything else.
    """
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{key} is {show(value)}, not a whole number above 0")
    if value > LARGEST:
        raise ValueError(f"{key} is {show(value)}, and must be at most {LARGEST}")
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    """Return the positive, finite number ``config[key]``. Raises as :func:`_count`."""
    value = config[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
        raise ValueError(f"{key} is {show(value)}, not a number above 0")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    """Return the boolean ``config[key]``; false if missing. Raises ``ValueError`` as :func:`_count`."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {show(value)}, not true or false")
    return bool(value)


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object ``config[key]``; empty if missing. Raises ``ValueError`` as :func:`_count`."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {show(value)}, not an object")
    return value or {}
