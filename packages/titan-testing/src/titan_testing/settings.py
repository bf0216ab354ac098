"""Settings of the jobs that suites and ``titan plugin check`` run, and the packages that they need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from titan_core.api import Component, Dataset, Tokenizer
from titan_core.plugins.discovery import discover

RECIPE = "tiny"
SMALL: Mapping[str, object] = {
    "job.device": "cpu",
    "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 64}",
    "training.steps": 3,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "lr_scheduler.warmup_steps": 1,
    "metrics.log_freq": 1,
}
"""A job that takes a second or two: three steps of two blocks."""


PATHS: Mapping[type[Component], str] = {Dataset: "training.dataset_path", Tokenizer: "model.tokenizer_path"}
"""Kind of a component -> the key of the file that it may need."""


def selecting(kind: type[Component], name: str, **others: object) -> dict[str, object]:
    """Return the overrides of :data:`RECIPE` for a small job with a component of a kind that :attr:`Component.keys` selects.

    Args:
        others: further keys of the section that names the component.
    """
    key = kind.keys[0]
    section = key.partition(".")[0]
    return {**SMALL, key: name, **{f"{section}.{other}": value for other, value in others.items()}}


def inline(values: Mapping[str, Any]) -> str:
    """Return ``values`` as an inline table of TOML: strings, numbers, booleans and lists of them read as in JSON."""
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + "}"


def is_usable(distribution: str) -> bool:
    """Whether a distribution's plugin is installed, and neither broken nor switched off."""
    return any(plugin.distribution == distribution for plugin in discover().plugins)
