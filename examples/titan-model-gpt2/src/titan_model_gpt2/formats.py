"""The weights of ``GPT2LMHeadModel`` of transformers: linear layers are stored transposed, and queries, keys and values are
one layer."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from titan_core.api import ForeignTensor
from titan_model_gpt2.config import GPT2Args

HF = {"dim": "n_embd", "n_layers": "n_layer", "n_heads": "n_head", "vocab_size": "vocab_size", "max_seq_len": "n_positions"}
FIXED = {
    "model_type": "gpt2", "activation_function": "gelu_new", "n_inner": None, "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
}  # fmt: skip
DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
WITHOUT_EFFECT = ("architectures", "dtype", "torch_dtype", "initializer_range", "n_ctx", "transformers_version", "use_cache")
PREFIXES = ("summary_", "bos_", "eos_", "pad_", "task_specific_")
LINEAR = {"attn.c_proj": "attention.proj", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.proj"}


def tensors(args: GPT2Args) -> list[ForeignTensor]:
    found = [part("wte.weight", "embedding.token.weight"), part("wpe.weight", "embedding.position.weight")]
    for layer, leaf in product(range(args.n_layers), ("weight", "bias")):
        h, block, swapped = f"h.{layer}", f"blocks.{layer}", leaf == "weight"
        for number, name in enumerate("qkv"):
            rows = {"rows": range(number * args.dim, (number + 1) * args.dim), "row_block": 3 * args.dim}
            found.append(part(f"{h}.attn.c_attn.{leaf}", f"{block}.attention.{name}.{leaf}", transpose=swapped, **rows))
        found += [part(f"{h}.{a}.{leaf}", f"{block}.{b}.{leaf}", transpose=swapped) for a, b in LINEAR.items()]
        found += [part(f"{h}.ln_{norm}.{leaf}", f"{block}.norm{norm}.{leaf}") for norm in (1, 2)]
    found += [part("ln_f.weight", "norm.weight"), part("ln_f.bias", "norm.bias")]
    head = "embedding.token.weight" if args.tie_embeddings else "unembedding.weight"
    return [*found, ForeignTensor("lm_head.weight", head, copy=args.tie_embeddings)]


def part(theirs: str, ours: str, **arrangement: Any) -> ForeignTensor:
    """Return a tensor of the decoder. The published files have no prefix."""
    return ForeignTensor(f"transformer.{theirs}", ours, aliases=(theirs,), **arrangement)


def to_args(config: Mapping[str, Any]) -> GPT2Args:
    known = {*HF.values(), *FIXED, *DROPOUT, *WITHOUT_EFFECT, "tie_word_embeddings"}
    for key, value in {"model_type": None, **config}.items():
        if key in FIXED and value != FIXED[key]:
            raise ValueError(f"{key} is {value!r}, and this model supports only {FIXED[key]!r}")
        if key not in known and not key.startswith(PREFIXES) and value not in (None, False, [], {}):
            raise ValueError(f"{key} is {value!r}, and this model does not know what that means")
    return GPT2Args(**{a: config[b] for a, b in HF.items()}, tie_embeddings=config.get("tie_word_embeddings", True))


def notes(config: Mapping[str, Any]) -> list[str]:
    return [f"{key} is {config[key]}, but this model trains without dropout" for key in DROPOUT if config.get(key)]


def from_args(args: GPT2Args) -> dict[str, Any]:
    sizes = {theirs: args.model_dump()[ours] for ours, theirs in HF.items()}
    more = {"architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": args.tie_embeddings}
    return {**FIXED, **sizes, **dict.fromkeys(DROPOUT, 0.0), **more}
