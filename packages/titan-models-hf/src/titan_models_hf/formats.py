"""Files of the hub: the names and the arrangement of tensors, and ``config.json``, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_core.api import ForeignTensor, UserError
from titan_core.toolkit.errors import close_names
from titan_core.toolkit.text import shorten, show
from titan_models_hf.cache import facts_of
from titan_models_hf.config import HFArgs, require_bounded
from titan_nn.hf_config import within_vocabulary

_WITHOUT_EFFECT = {
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "add_cross_attention", "architectures",
    "attn_implementation", "auto_map", "bad_words_ids", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "do_sample", "dtype",
    "eos_token_id", "finetuning_task", "id2label", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty",
    "max_length", "min_length", "model_type", "name_or_path", "no_repeat_ngram_size", "num_beams", "num_labels",
    "num_return_sequences", "output_attentions", "output_hidden_states", "pad_token_id", "prefix", "problem_type",
    "pruned_heads", "repetition_penalty", "return_dict", "sep_token_id", "task_specific_params", "temperature",
    "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version",
    "typical_p", "unk_token_id", "use_bfloat16", "use_cache",
}  # fmt: skip
"""Keys of config.json that do not change what the model computes in training: of the file, of the library, of generation."""


def to_args(config: Mapping[str, Any]) -> HFArgs:
    """Return the model that a ``config.json`` describes.

    Raises:
        KeyError: a key is missing.
        ValueError: it describes no causal decoder of the library, or one that Titan does not understand.
    """
    args = arguments(config)
    try:
        facts_of(args)
    except UserError as error:
        raise ValueError(_reasons(error)) from error
    return args


def arguments(config: Mapping[str, Any]) -> HFArgs:
    """Return the arguments of the model that a ``config.json`` describes, whether or not Titan understands the model.

    Raises:
        KeyError: a key is missing.
        ValueError: it describes no causal language model of the library, or not as the library reads it.
    """
    architecture = config["model_type"]
    if not isinstance(architecture, str):
        raise ValueError(f"model_type is {show(architecture)}, not text")
    if any(key.startswith("text_") and key.endswith("config") for key in config):
        why = f"model_type {architecture!r} has text_config: it is a model of several modalities"
        raise ValueError(f"{why}, and this model is one of text alone")
    from titan_models_hf import transformers_private as library
    from titan_models_hf.library import configuration, rejection

    if architecture not in library.architectures():
        close = close_names(architecture, library.architectures())
        hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
        why = f"transformers {library.VERSION} has no causal language model with model_type {show(architecture)}{hint}"
        raise ValueError(why)
    ours = library.class_name(architecture)
    theirs = config.get("architectures")
    if theirs and not (isinstance(theirs, list) and ours in theirs):
        raise ValueError(f"architectures is {show(theirs)}, and the library's causal language model is {ours}")
    require_bounded(config)
    try:
        read = library.configuration_of_file({key: value for key, value in config.items() if key != "auto_map"})
    except Exception as error:  # as in configuration()
        raise ValueError(rejection(error)) from error
    architecture = read.model_type  # the library may read a file as another architecture's
    known = library.config_keys(architecture)
    args = HFArgs(
        architecture=architecture,
        config={key: value for key, value in config.items() if key in known and key not in _WITHOUT_EFFECT},
    )
    try:
        mine, whole = library.plain_config(configuration(args)), library.plain_config(read)
    except UserError as error:
        raise ValueError(_reasons(error)) from error
    for key, value in mine.items():
        if key not in _WITHOUT_EFFECT and value != whole.get(key):
            why = f"transformers reads {key} = {show(whole.get(key), key)} from this file, and Titan {show(value, key)}"
            raise ValueError(f"{why}: a key of the file is not understood")
    return args


def _reasons(error: UserError) -> str:
    from titan_models_hf.library import OTHER_MODEL

    shown = []
    for one in error.problems:
        key = one.where.removeprefix("model.args.config.")
        why = one.why if key == one.where else f"{key} {one.why}"
        shown.append(why if one.fix == OTHER_MODEL else f"{why} ({one.fix})")
    return "; ".join(shown)


def notes(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a ``config.json`` that the library does not read."""
    from titan_models_hf import transformers_private as library

    known = library.config_keys(arguments(config).architecture)
    unread = [key for key in config if key not in known and key not in _WITHOUT_EFFECT]
    shown = shorten(", ".join(unread))
    return [f"transformers {library.VERSION} does not read {shown}"] if unread else []


def from_args(args: HFArgs) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    from titan_models_hf import transformers_private as library
    from titan_models_hf.library import configuration

    config = configuration(args)
    contents = library.plain_config(config)
    kept = {key: value for key, value in contents.items() if key not in ("dtype", "torch_dtype")}
    outside = [key for key, value in kept.items() if within_vocabulary(key, value, kept.get("vocab_size")) != value]
    for key in outside:  # the library's default, for a larger vocabulary
        if library.accepts(args.architecture, {**args.config, key: None}):
            kept[key] = None
        elif key == "pad_token_id":
            kept[key] = 0  # the library looks up its row, and no text has padding
    return {**kept, "architectures": [library.class_name(args.architecture)], "model_type": args.architecture}


def tensors(args: HFArgs) -> list[ForeignTensor]:
    """Return the tensors of the library's files."""
    from titan_models_hf.arrangement import foreign_tensors

    return foreign_tensors(args)
