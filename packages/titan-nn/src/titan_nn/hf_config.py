"""Values of the ``config.json`` of a model hub, and of similar files: read with their types, known or refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from titan_core.api.config.numbers import LARGEST
from titan_core.toolkit.text import shorten, show

_NOTHING: tuple[object, ...] = (None, False, [], {}, "")
_IDS = {"bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "unk_token_id"}
WITHOUT_EFFECT = {
    "initializer_range", "use_cache", "attention_dropout",
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
"""Keys that do not change what a decoder computes from its weights in evaluation mode: of any model, of the file, of
generation."""


_OF_TOKENS = ("_token_id", "_token_ids", "_token_index", "_words_ids", "_decoder_ids", "suppress_tokens")
"""Ends of keys, in ``config.json`` and ``generation_config.json``, whose values are ids of tokens, or lists of these."""


def within_vocabulary(key: str, value: Any, vocab_size: object) -> Any:
    """Return the value of a key without ids of tokens that the vocabulary lacks; ``None`` if no id is left. Values of keys
    that name no tokens are returned as they are."""
    if not key.endswith(_OF_TOKENS) or not isinstance(vocab_size, int):
        return value
    if isinstance(value, list):
        return [one for one in value if within_vocabulary(key, one, vocab_size) == one] or (None if value else value)
    return None if isinstance(value, int) and not 0 <= value < vocab_size else value


def unused_notes(config: Mapping[str, Any], without_effect: Collection[str]) -> list[str]:
    """Return one line for each difference between a ``config.json`` and a model that trains without dropout that does not
    change what the weights compute."""
    notes = []
    if config.get("attention_dropout"):
        notes.append(f"attention_dropout is {show(config['attention_dropout'])}, but this model trains without dropout")
    unused = sorted(key for key in config if key in without_effect and key != "attention_dropout")
    if unused:
        notes.append(f"not used: {', '.join(unused)}")
    return notes


def require_known(config: Mapping[str, Any], architecture: str, known: Collection[str]) -> None:
    """Refuse a ``config.json`` with settings that a model may have to honour.

    Args:
        config: its contents.
        architecture: the class for causal language models, whose name ends with ``ForCausalLM``.
        known: keys that the model reads, or that have no effect.

    Raises:
        ValueError: a key is unknown, and has a value.
    """
    architectures = config.get("architectures")
    if architectures not in (None, [], [architecture], [architecture.replace("ForCausalLM", "Model")]):
        raise ValueError(f"architectures is {show(architectures)}, and this model is {architecture}")
    for key, value in config.items():
        if key not in known and key not in _IDS and key != "architectures" and value not in _NOTHING:
            raise ValueError(f"{shorten(key)} is {show(value, key)}, and this model does not know what that means")


def require_plain(config: Mapping[str, Any], biases: Collection[str]) -> None:
    """Refuse what decoders without biases, with SwiGLU and rotation of whole heads lack.

    Args:
        config: contents of ``config.json``.
        biases: keys that say whether layers have biases.

    Raises:
        ValueError: names the key.
    """
    for key in biases:
        if flag(config, key):
            raise ValueError(f"{key} is true, and this model has no biases")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {show(config['hidden_act'])}, and this model supports only 'silu'")
    if config.get("is_causal") is False:  # which the library's masks read, whatever the architecture
        raise ValueError("is_causal is false, and positions of this model do not see later ones")


def rope_parameters(config: Mapping[str, Any], kinds: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Return the table of rotary frequencies of a ``config.json``, with ``rope_type`` and ``rope_theta``.

    The keys have several homes, resolved as by transformers 5 (``RotaryEmbeddingConfigMixin``): ``rope_scaling`` is
    another name of ``rope_parameters`` and, unless it is empty, the one that is read; a key of that table precedes the same
    key beside it, and ``rope_type`` precedes ``type``.

    Args:
        config: contents of the file.
        kinds: ``rope_type`` that the model supports -> keys of the table that it reads, besides those of all types.

    Raises:
        ValueError: the type is not one of those, a key is unknown, or the model would rotate a part of each head.
    """
    name = "rope_scaling" if table(config, "rope_scaling") else "rope_parameters"
    found = {"rope_theta": config.get("rope_theta", 10_000.0), **table(config, name)}
    kind = found.setdefault("rope_type", found.get("type", "default"))
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"rope_type is {show(kind)}, and this model supports only {' and '.join(map(repr, kinds))}")
    partial = found.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor is {show(partial)}, and this model rotates whole heads")
    for key, value in found.items():
        if key not in (*_OF_ROPE, *kinds[kind]) and value is not None:
            raise ValueError(f"{name}.{shorten(key)} is {show(value)}, and this model does not know what that means")
    if "max_position_embeddings" in config:
        found.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return {**found, "rope_theta": number(found, "rope_theta")}


_OF_ROPE = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


def count(config: Mapping[str, Any], key: str) -> int:
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


def number(config: Mapping[str, Any], key: str) -> float:
    """Return the positive, finite number ``config[key]``. Raises as :func:`count`."""
    value = config[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
        raise ValueError(f"{key} is {show(value)}, not a number above 0")
    return float(value)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Return the boolean ``config[key]``; false if missing. Raises ``ValueError`` as :func:`count`."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {show(value)}, not true or false")
    return bool(value)


def table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object ``config[key]``; empty if missing. Raises ``ValueError`` as :func:`count`."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {show(value)}, not an object")
    return value or {}
