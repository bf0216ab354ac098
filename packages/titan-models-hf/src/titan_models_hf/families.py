"""What families compute outside of their modules, moved into these; and plans for tensor parallelism that the library lacks.

A pipeline stage has some of the modules, and tensor parallelism shards the logits inside the head: code of a model's own
``forward`` that changes the hidden states after the embedding, or the logits, is part of neither. Titan's trial refuses a
family that needs an entry here and has none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from titan_models_hf import transformers_private as library


class Multiply:
    """Multiplies by a number."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        return x * self.factor


class Divide(Multiply):
    """Divides by a number."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the quotient."""
        return x / self.factor


class Softcap(Multiply):
    """Caps smoothly to a magnitude (Gemma Team, arXiv 2408.00118, section 2)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the capped values."""
        return torch.tanh(x / self.factor) * self.factor


def adapt(model: Any, architecture: str) -> None:
    """Move what ``model`` computes outside of its modules into its embedding and its head."""
    config, base, head = model.config, model.get_submodule(library.base_name(model)), model.get_output_embeddings()
    if architecture.startswith("granite") and hasattr(base, "embedding_multiplier"):
        _append(model.get_input_embeddings(), Multiply(base.embedding_multiplier))
        base.embedding_multiplier = 1.0
        _append(head, Divide(config.logits_scaling))
        config.logits_scaling = 1.0
    if architecture == "hyperclovax":
        _append(model.get_input_embeddings(), Multiply(config.embedding_multiplier))
        _append(head, Multiply(config.logits_scaling))
        base.embedding_multiplier = config.embedding_multiplier = config.logits_scaling = 1.0
    if architecture == "falcon_h1":
        _append(model.get_input_embeddings(), Multiply(base.embedding_multiplier))
        _append(head, Multiply(base.lm_head_multiplier))
        base.embedding_multiplier = base.lm_head_multiplier = 1.0
    if hasattr(model, "logit_scale") and architecture.startswith("cohere"):
        _append(head, Multiply(model.logit_scale))
        model.logit_scale = 1.0
    if getattr(config, "final_logit_softcapping", None) and not hasattr(model, "logit_softcap"):
        _append(head, Softcap(config.final_logit_softcapping))
        vars(config)["final_logit_softcapping"] = None  # of some configs a value that their own check rejects
        if hasattr(model, "final_logit_softcapping"):
            model.final_logit_softcapping = None


def _append(module: Any, after: Callable[[Tensor], Tensor]) -> None:
    cls: Any = type(module)
    module.__class__ = _followed(cls)
    module.titan_after = after


@cache
def _followed(base: Any) -> type:
    """Return a subclass of the module class ``base`` that applies ``titan_after`` to the result."""

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Tensor:
        result: Tensor = self.titan_after(base.forward(self, *arguments, **keywords))
        return result

    return type(base.__name__, (base,), {"forward": forward})


def tensor_plan(architecture: str) -> dict[str, str]:
    """Return the plan for tensor parallelism of a family without one: pattern of module names -> style."""
    if architecture in ("deepseek_v3", "deepseek_v2"):
        return {
            "*.self_attn.q_b_proj": "colwise",
            "*.self_attn.q_proj": "colwise",
            "*.self_attn.kv_b_proj": "colwise",
            "*.self_attn.o_proj": "rowwise",
        }
    attention = {"*.self_attn.[qkv]_proj": "colwise", "*.self_attn.o_proj": "rowwise"}
    if architecture == "gpt_oss":
        return attention
    if architecture == "falcon_h1":
        return {
            **attention,
            "*.feed_forward.gate_proj": "colwise",
            "*.feed_forward.up_proj": "colwise",
            "*.feed_forward.down_proj": "rowwise",
        }
    return {}
