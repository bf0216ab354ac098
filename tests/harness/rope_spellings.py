"""Every way in which a ``config.json`` may state its rotary frequencies, also those that contradict themselves, and what the
transformers library makes of one: the reference of whatever reads such a file."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HALF = 8
"""Frequencies of a head of :data:`SIZES`."""
SIZES: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 2 * HALF, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "pad_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": 64, "short_factor": [1.0] * HALF, "long_factor": [3.0] * HALF,
    },
}  # fmt: skip
_OTHER = {"rope_type": "linear", "factor": 7.0, "rope_theta": 70_000.0}


def spellings(kind: str) -> dict[str, dict[str, Any]]:
    """Return keys of files whose tables have this kind, by a name of each spelling."""
    found = {}
    for typed, place, theta in itertools.product(_TYPES, _PLACES, _THETAS):
        inner, outer = _THETAS[theta]
        table = {**KINDS[kind], **{key: kind if value is None else value for key, value in _TYPES[typed].items()}, **inner}
        found[f"{typed}, {place}, {theta}"] = {**_placed(table)[place], **outer}
    return found


_TYPES: dict[str, dict[str, str | None]] = {  # None: the kind
    "rope_type": {"rope_type": None},
    "type": {"type": None},
    "both": {"rope_type": None, "type": None},
    "other type": {"rope_type": None, "type": "yarn"},
    "no type": {},
}
_PLACES = ("rope_scaling", "rope_parameters", "scaling before", "parameters before", "empty scaling", "layers", "one layer")
_THETAS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "no theta": ({}, {}),
    "theta beside": ({}, {"rope_theta": 20_000.0}),
    "theta in": ({"rope_theta": 500_000.0}, {}),
    "theta in and beside": ({"rope_theta": 500_000.0}, {"rope_theta": 20_000.0}),
}


def _placed(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "rope_scaling": {"rope_scaling": table},
        "rope_parameters": {"rope_parameters": table},
        "scaling before": {"rope_scaling": table, "rope_parameters": _OTHER},
        "parameters before": {"rope_scaling": _OTHER, "rope_parameters": table},
        "empty scaling": {"rope_scaling": {}, "rope_parameters": table},
        "layers": {"rope_parameters": {"full_attention": table, "sliding_attention": _OTHER}},
        "one layer": {"rope_scaling": {"full_attention": table}},
    }


def library_config(contents: dict[str, Any], folder: Path) -> Any:
    """Return the config that the library reads from a file, or ``None`` if it rejects it."""
    import transformers

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(contents))
    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except Exception:  # noqa: BLE001 (its validation raises various types)
        return None


def frequencies(config: Any) -> dict[str, Tensor] | None:
    """Return the buffers of the library's rotary module for ``config``, and its factors of cosines and sines. ``None``: the
    library does not compute them."""
    import transformers

    module = sys.modules[transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__]
    (rotary_class,) = (cls for name, cls in vars(module).items() if name.endswith("RotaryEmbedding"))
    try:
        rotary = rotary_class(config)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):  # a key that the table lacks, another type
        return None
    factors = {name: torch.tensor(value) for name, value in vars(rotary).items() if name.endswith("attention_scaling")}
    return {**dict(rotary.named_buffers()), **factors}


def equal(found: dict[str, Tensor] | None, expected: dict[str, Tensor] | None) -> bool:
    """Return whether two results of :func:`frequencies` are the same."""
    if found is None or expected is None:
        return found is expected
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def read_and_written(
    kind: str,
    base: dict[str, Any],
    folder: Path,
    to_args: Callable[[dict[str, Any]], Any],
    from_args: Callable[[Any], dict[str, Any]],
    table_of: Callable[[Any], Tensor],
) -> int:
    """Compare a model with rotation of whole heads with the library, for each spelling of a kind; return how many it reads.

    Args:
        base: the file's keys besides those of rotation.
        to_args: raises ``ValueError`` or ``KeyError`` for what it does not read.
        table_of: arguments -> cosines and sines of all positions, ``[positions, 2, HALF]``.
    """
    read = 0
    for name, keys in spellings(kind).items():
        theirs = library_config({**base, **keys}, folder / "file")
        try:
            args = to_args({**base, **keys})
        except (ValueError, KeyError):
            continue  # another plugin may read it
        expected = frequencies(theirs)
        assert expected is not None, name
        assert expected["attention_scaling"] == 1, name
        found = table_of(args)
        angles = torch.outer(torch.arange(len(found), dtype=torch.float32), expected["inv_freq"])
        torch.testing.assert_close(found, torch.stack((angles.cos(), angles.sin()), dim=1), rtol=0, atol=1e-6, msg=name)
        assert equal(frequencies(library_config(from_args(args), folder / "written")), expected), name
        read += 1
    return read
