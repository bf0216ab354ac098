"""The arguments of a model of transformers: its architecture, and its config's keys. Imports neither torch nor the
library."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from titan_core.api.config.numbers import MOST_LAYERS
from titan_core.toolkit.text import show

# torch warns of what libraries do that transformers imports; it is no user's mistake.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)

MOST_PARTS: Final = 1 << 16
"""Heads, experts and other parts of a layer."""
MOST: Final = 1 << 31
"""Any other number."""
DEEPEST: Final = 16
"""Levels of tables and lists in a value."""
NONE = "none"
"""Stands for ``None``, which TOML lacks."""


class HFArgs(BaseModel):
    """Arguments of a decoder of the transformers library."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    architecture: str = Field(min_length=1)
    """The library's name of the architecture, model_type in its config.json ("qwen3", "gemma3_text")."""
    config: dict[str, Any] = {}
    """Keys of its config.json that differ from the library's defaults; "none" stands for null."""

    @field_validator("config")
    @classmethod
    def _with_none(cls, config: dict[str, Any]) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(_with_none(config), sort_keys=True))
        require_bounded(plain)
        return plain

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def text(self) -> str:
        """JSON that is equal for equal arguments."""
        return json.dumps([self.architecture, self.config], sort_keys=True)


def require_bounded(config: Mapping[str, Any]) -> None:
    """Refuse sizes that the library would take all memory or hours to build: it makes a module for each layer. Values of no
    known config are nested deeper than :data:`DEEPEST`, and pydantic writes none that is.

    Raises:
        ValueError: names the key, the value and the bound.
    """
    for key, value in config.items():
        if _deeper(value, DEEPEST):
            raise ValueError(f"{key} has more than {DEEPEST} levels of tables and lists")
    _require_sizes(config)


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inner) and (levels == 0 or any(_deeper(one, levels - 1) for one in inner))


def _require_sizes(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if isinstance(value, dict):
            _require_sizes(value)
        size = len(value) if isinstance(value, list) else value
        if isinstance(size, bool) or not isinstance(size, int):
            continue
        counts = key.startswith(("num_", "n_")) or key.endswith(("_num", "_heads"))
        most = MOST_LAYERS if ("layer" in key and counts) or isinstance(value, list) else MOST_PARTS if counts else MOST
        if size > most:
            shown = f"has {size} entries" if isinstance(value, list) else f"is {show(size)}"
            raise ValueError(f"{key} {shown}, and must be less than or equal to {most}")


def _with_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_none(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_none(one) for one in value]
    return None if value == NONE else value


FLAVORS: Final[dict[str, HFArgs]] = {
    # 288 rows hold the 258 tokens of the byte tokenizer, and are divisible by 2, 4, 8, 16 and 32.
    "debug": HFArgs(
        architecture="qwen3",
        config={
            "vocab_size": 288, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
    ),
    # arXiv 2505.09388
    "qwen3-8B": HFArgs(
        architecture="qwen3",
        config={
            "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": False,
        },
    ),
    # arXiv 2503.19786: the text model of Gemma 3 4B
    "gemma3-4B": HFArgs(
        architecture="gemma3_text",
        config={
            "vocab_size": 262_208, "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256, "sliding_window": 1024, "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    # Allen Institute for AI, 2025: the first stage of OLMo 3 7B, before its context is extended
    "olmo3-7B": HFArgs(
        architecture="olmo3",
        config={
            "vocab_size": 100_278, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
            "rope_theta": 500_000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        },
    ),
    # arXiv 2508.10925
    "gpt-oss-20B": HFArgs(
        architecture="gpt_oss",
        config={
            "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
            "num_experts_per_tok": 4, "max_position_embeddings": 131_072, "sliding_window": 128,
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
"""Published sizes, and one for tests."""
