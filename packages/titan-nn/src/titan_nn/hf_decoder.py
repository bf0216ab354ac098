"""Files of model hubs for decoders built of :mod:`titan_nn.decoder`: names of tensors, and sizes in ``config.json``.
Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titan_core.api import ForeignTensor
from titan_nn.decoder_layout import DecoderArgs
from titan_nn.hf_config import count, flag, number

OF_A_LAYER = {
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
"""Module of a block -> its name there."""
SIZES = {
    "hidden_act", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "tie_word_embeddings", "attention_bias", "model_type",
}  # fmt: skip
"""Keys of ``config.json`` that all these models read."""


def hf_tensors(
    args: DecoderArgs, of_a_layer: Mapping[str, str] = OF_A_LAYER, rows: Mapping[str, Sequence[int]] | None = None
) -> list[ForeignTensor]:
    """Return the tensors of the files.

    Args:
        args: sizes of the model.
        of_a_layer: module of a block -> its name there.
        rows: module of a block -> order of the rows of its weight there, if it differs.
    """
    tensors = [ForeignTensor("model.embed_tokens.weight", "tok_embeddings.weight")]
    for layer in range(args.n_layers):
        for ours, theirs in of_a_layer.items():
            order = (rows or {}).get(ours, ())
            tensors.append(ForeignTensor(f"model.layers.{layer}.{theirs}.weight", f"layers.{layer}.{ours}.weight", order))
    tensors.append(ForeignTensor("model.norm.weight", "norm.weight"))
    if args.tie_embeddings:
        tensors.append(ForeignTensor("lm_head.weight", "tok_embeddings.weight", copy=True))
    else:
        tensors.append(ForeignTensor("lm_head.weight", "output.weight"))
    return tensors


def written_sizes(args: DecoderArgs) -> dict[str, Any]:
    """Return keys of ``config.json`` by transformers 4, which version 5 also reads."""
    return {
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
        "tie_word_embeddings": args.tie_embeddings,
        "attention_bias": False,
    }


def read_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that ``config.json`` states, without the width of a head.

    Raises:
        KeyError: a key is missing.
        ValueError: a value is wrong.
    """
    heads = count(config, "num_attention_heads")
    return {
        "dim": count(config, "hidden_size"),
        "n_layers": count(config, "num_hidden_layers"),
        "n_heads": heads,
        "n_kv_heads": heads if config["num_key_value_heads"] is None else count(config, "num_key_value_heads"),
        "ffn_dim": count(config, "intermediate_size"),
        "vocab_size": count(config, "vocab_size"),
        "max_seq_len": count(config, "max_position_embeddings"),
        "norm_eps": number(config, "rms_norm_eps"),
        "tie_embeddings": flag(config, "tie_word_embeddings"),
    }
