"""The attention function ``titan`` of transformers: it calls the mixer of the attention module."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from titan_models_hf import transformers_private as library

NAME: Final = "titan"

HARMLESS: Final = frozenset({
    "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict",
    "output_router_logits", "is_causal", "position_embeddings", "num_items_in_batch",
})  # fmt: skip
"""Keywords that reach an attention function and do not change what it computes."""
KNOWN: Final = frozenset({"dropout", "scaling", "documents", "sliding_window", "softcap", "s_aux"})
"""Keywords that Titan understands."""


class Call(NamedTuple):
    """What an attention module passes to the attention function."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: bool


def unknown(keywords: dict[str, Any]) -> list[str]:
    """Return the keywords that may change what an attention computes in a way that Titan does not know."""
    return sorted({name for name, value in keywords.items() if value is not None} - HARMLESS - KNOWN)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    documents: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention by the mixer of ``module``, which Titan's transforms may have replaced.

    Args:
        query: ``[batch, heads, seq, width]``; key and value likewise, with as many heads or with fewer.
        attention_mask: ``None``: the mixer knows the mask.
        s_aux: a logit per head that takes part in the softmax and has no value.

    Returns:
        ``[batch, seq, heads, width of value]``, and no weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = Call(scale, sliding_window, softcap, s_aux is not None)
    if found != module.titan_call or attention_mask is not None or dropout or (others and unknown(others)):
        raise RuntimeError(
            f"attention differs from the one that Titan derived: {found} in place of {module.titan_call}, mask "
            f"{attention_mask is not None}, dropout {dropout}, others {unknown(others)}"
        )
    more = {} if s_aux is None else {"sinks": s_aux}
    arguments = (query, key, value) if documents is None else (query, key, value, documents)
    mixed: Tensor = module.titan_mixer(*arguments, **more)  # type: ignore[operator]
    return mixed.transpose(1, 2), None


library.register(NAME, attend)
