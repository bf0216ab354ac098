"""``[model]``: the family, its size and its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import PurePath
from typing import Any, Final

from titan_core.api.errors import UserError
from titan_core.api.tools.shown import show
from titan_torchtitan.keys import EARLY, LAST, LATE, MIDDLE, TORCHTRAIN, Generation
from titan_torchtitan.outcome import ImportOutcome

LLAMA_3: Final = "llama3"
"""Titan's name for the family that TorchTitan's ``llama3`` belongs to."""
_VARIANTS = frozenset(
    {"simple", "fsdp", "ft", "auto", "parallel", "autopartition", "compiler", "toolkit", "torchcomms", "mx", "experiments"}
    | {"1", "2", "3"}
)
"""Words of the names under which TorchTitan's experiments train Llama 3 by other means, and the numbers of its versions."""
_SAME_FLAVORS = ("8B", "70B", "405B")
_LLAMA_32_FLAVORS = ("1B", "3B")
_DOCUMENT_MASK = re.compile(r"_(?:flex|varlen)(?:_(?:attn|flash|triton))?$")
"""Ending of flavors that restrict attention to documents; it may name the kernel."""


_COMMON: Final = {"norm_eps": 1e-5, "tie_embeddings": False}


def _ffn_dim(dim: int, multiple_of: int = 256, multiplier: float = 1.0) -> int:
    """Return the width inside the feed-forward layer, as Llama's reference code rounds it."""
    width = int(multiplier * int(2 * 4 * dim / 3))
    return multiple_of * -(-width // multiple_of)


def _llama_2(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int | None = None, ffn_dim: int | None = None
) -> dict[str, Any]:
    return {
        "dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads or n_heads,
        "ffn_dim": ffn_dim or _ffn_dim(dim), "vocab_size": 32_000, "max_seq_len": 4096, "rope_theta": 10_000.0,
        **_COMMON,
    }  # fmt: skip


_LLAMA_2: Final[dict[str, dict[str, Any]]] = {
    "debugmodel": _llama_2(256, 8, 16),
    "271M": _llama_2(1024, 16, 8),
    "1B": _llama_2(2048, 18, 16),
    "7B": _llama_2(4096, 32, 32),
    "13B": _llama_2(5120, 40, 40),
    "26B": _llama_2(5120, 80, 40),
    "70B": _llama_2(8192, 80, 64, 8, _ffn_dim(8192, 4096, 1.3)),
}
"""TorchTitan's sizes of Llama 2, in Titan's arguments."""

_BASE_FLAVOR = "debug"
"""The flavor whose arguments are replaced. Unlike the others, it does not scale RoPE."""


def import_model(outcome: ImportOutcome, installed: Collection[str]) -> None:
    """
    Args:
        installed: the model families of the installed plugins.

    Raises:
        UserError: Titan has no such model.
    """
    old = outcome.old
    name = str(old.get("model.name", "llama" if old.generation == TORCHTRAIN else LLAMA_3))
    words = set(re.split(r"[./_-]", name))
    if name in installed and name != LLAMA_3:  # a plugin has a model of this name
        outcome.keep("model.name", "model.flavor", why="the model of an installed plugin; compare its arguments")
        _tokenizer(outcome, sentencepiece=False)
    elif name in ("llama", "llama2"):
        _llama_2_flavor(outcome)
        _tokenizer(outcome, sentencepiece=True)
    elif "llama3" in words and words - {"llama3"} <= _VARIANTS:
        _llama_3_flavor(outcome, name)
        _tokenizer(outcome, sentencepiece=False)
    else:
        why = f"is not among the models of the installed plugins ({', '.join(installed) or 'none'})"
        fix = 'install a plugin with this model, or write one: docs/plugins.md, "A model"'
        raise UserError.one(f"{old.source}: model.name = {show(name)}", why, fix)
    norm = old.get("model.norm_type", "rmsnorm")
    if norm in ("rmsnorm", "fused_rmsnorm", "compiled_rmsnorm"):
        outcome.ignore("Llama has RMSNorm, whatever the kernel", "model.norm_type")
    else:
        outcome.refuse("model.norm_type", "Llama has RMSNorm only; another norm needs a model plugin")
    outcome.ignore("`titan job show` describes the model", "model.print_after_conversion")
    outcome.ignore("Titan selects the attention kernel", "model.use_flex_attn")
    if old.get("model.attn_mask_type") == "block_causal":
        outcome.set("model.attn_mask_type", {"data.document_mask": True}, "positions also start at 0 in each document")
    else:
        outcome.ignore("attention is causal", "model.attn_mask_type")


def _llama_3_flavor(outcome: ImportOutcome, name: str) -> None:
    old = outcome.old
    variant = "" if name == LLAMA_3 else "the same model; the experiment's way to train it has no equivalent"
    outcome.set("model.name", {"model.name": LLAMA_3}, variant)
    if not old.has("model.name"):
        outcome.default("model.name", LLAMA_3)
    flavor = str(old.get("model.flavor", "debugmodel"))
    size = _DOCUMENT_MASK.sub("", flavor)
    masked = size != flavor
    size = next((known for known in _LLAMA_32_FLAVORS + _SAME_FLAVORS if known.lower() == size.lower()), size)
    new: dict[str, Any] = {"model.flavor": size}
    notes = []
    scales_rope = old.generation >= LAST
    if size == "debugmodel":
        # TorchTitan made its debug model smaller in spring 2025.
        args = {
            "dim": 256, "n_layers": 6 if old.generation >= MIDDLE else 8, "n_heads": 16, "n_kv_heads": 16,
            "ffn_dim": _ffn_dim(256), "vocab_size": _debug_vocabulary(outcome), "max_seq_len": 131_072,
            "rope_theta": 500_000.0, **_COMMON,
        }  # fmt: skip
        new = {"model.flavor": _BASE_FLAVOR, **_prefixed(args)}
        if scales_rope:
            new["model.args.rope_scaling.factor"] = 8.0
        notes.append("TorchTitan's shape; its vocabulary was the tokenizer's")
    elif size in _LLAMA_32_FLAVORS + _SAME_FLAVORS:
        if size in _LLAMA_32_FLAVORS:
            notes.append("not a size of TorchTitan: this is Llama 3.2's")
        if not scales_rope:
            new["model.args.rope_scaling.factor"] = 1.0
            notes.append("TorchTitan did not scale RoPE before October 2025; factor 1 means no scaling")
    else:
        sizes = ", ".join(_LLAMA_32_FLAVORS + _SAME_FLAVORS)
        why = f"not a size of TorchTitan: describe it by a size of Titan ({sizes}) and [model.args]"
        outcome.refuse("model.flavor", why, {"model.flavor": size, **({"data.document_mask": True} if masked else {})})
        return
    if masked:
        new["data.document_mask"] = True
        notes.append("attends within documents; positions also start at 0 in each")
    _flavor(outcome, new, "; ".join(notes))


def _llama_2_flavor(outcome: ImportOutcome) -> None:
    old = outcome.old
    outcome.set("model.name", {"model.name": LLAMA_3}, "Llama 2 is the same architecture, described by [model.args]")
    if not old.has("model.name"):
        outcome.default("model.name", LLAMA_3)
    flavor = str(old.get("model.flavor", "debugmodel"))
    if flavor not in _LLAMA_2:
        why = f"not a size of TorchTitan's Llama 2 ({', '.join(_LLAMA_2)}): describe it by [model.args]"
        outcome.refuse("model.flavor", why, {"model.flavor": flavor})
        return
    args = dict(_LLAMA_2[flavor])
    args["max_seq_len"] = max(args["max_seq_len"], int(old.get("training.seq_len", 2048)))
    _flavor(outcome, {"model.flavor": _BASE_FLAVOR, **_prefixed(args)}, "the sizes of Llama 2")


def _flavor(outcome: ImportOutcome, new: dict[str, Any], why: str) -> None:
    if outcome.old.has("model.flavor"):
        outcome.set("model.flavor", new, why)
        return
    for key, value in new.items():
        outcome.default(key, value)


def _prefixed(args: dict[str, Any]) -> dict[str, Any]:
    return {f"model.args.{name}": value for name, value in args.items()}


def _debug_vocabulary(outcome: ImportOutcome) -> int:
    """Return the size of the debug model's vocabulary: that of the tokenizer, which TorchTitan fixed to 2048 later."""
    path = _tokenizer_path(outcome)[1]
    if path.endswith("test_tiktoken.model"):
        return 2256  # 2000 ranks and 256 special tokens
    return 128_256 if path.endswith(".model") or "tests/assets" not in path else 2048


def _tokenizer_path(outcome: ImportOutcome) -> tuple[str, str]:
    """Return the key that names the tokenizer (empty: a default) and the path."""
    for key in ("model.tokenizer_path", "model.hf_assets_path"):
        if outcome.old.get(key):
            return key, outcome.old.get(key)
    return "", _DEFAULT_TOKENIZER[outcome.old.generation]


_DEFAULT_TOKENIZER: Final[dict[Generation, str]] = {
    TORCHTRAIN: "./torchtrain/datasets/tokenizer/tokenizer.model",
    EARLY: "./torchtitan/datasets/tokenizer/tokenizer.model",
    MIDDLE: "./torchtitan/datasets/tokenizer/tokenizer.model",
    LATE: "./tests/assets/tokenizer",
    LAST: "./tests/assets/tokenizer",
}


def _tokenizer(outcome: ImportOutcome, sentencepiece: bool) -> None:
    key, path = _tokenizer_path(outcome)
    if not path.endswith(".model"):
        new, why = {"model.tokenizer": "hf", "model.tokenizer_path": path}, "reads the folder's tokenizer.json"
    elif sentencepiece:
        path = str(PurePath(path).with_name("tokenizer.json"))
        new = {"model.tokenizer": "hf", "model.tokenizer_path": path if path.startswith(("/", "~")) else f"./{path}"}
        why = (
            "Llama 2's tokenizer.model is a SentencePiece file: put the model's tokenizer.json, with the same ids, beside it"
        )
    else:
        new, why = {"model.tokenizer": "llama3", "model.tokenizer_path": path}, ""
    if key:
        outcome.set(key, new, why)
    else:
        for name, value in new.items():
            outcome.default(name, value)
    outcome.ignore("model.tokenizer_path names the tokenizer", "model.hf_assets_path")
    outcome.ignore("not set", "model.tokenizer_path")
