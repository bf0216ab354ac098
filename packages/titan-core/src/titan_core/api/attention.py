"""Causal attention over whole sequences, or within the documents packed into them."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api.decoding import current_decoding


class CausalAttention(nn.Module):
    """Causal softmax attention, in which each position attends to earlier positions of its document and to itself. Models
    may use it as a mixer (:class:`~titan_core.api.layout.ModelLayout`).

    It calls ``scaled_dot_product_attention``, with a mask if documents are given. On CUDA devices, documents use
    FlexAttention (He et al., arXiv 2412.05496) instead, which skips blocks that are masked completely; FlexAttention has no
    backward on CPUs.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """
        Args:
            q: ``[batch, heads, seq, head_dim]``.
            k: like ``q``, with the same number of heads or a divisor of it (grouped-query attention).
            v: like ``k``.
            documents: the document of each position, ``[batch, seq]``; ``None``: one document per sequence.
        """
        decoding = current_decoding()
        if decoding is not None:
            return decoding.attend(self, q, k, v)
        grouped = q.shape[1] != k.shape[1]
        if documents is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if q.device.type == "cuda":
            return flex_attend(q, k, v, documents)
        mask = causal_mask(documents, documents)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def causal_mask(of_queries: Tensor, of_keys: Tensor, first: int = 0) -> Tensor:
    """Return which keys each query attends to: those at or before its position, in its document.

    Args:
        of_queries: document of each query, ``[batch, queries]``.
        of_keys: document of each key, from position 0, ``[batch, keys]``.
        first: position of the first query.

    Returns:
        A boolean mask, ``[batch, 1, queries, keys]``.
    """
    same = of_queries[:, :, None] == of_keys[:, None, :]
    return same.tril(first)[:, None]


def flex_attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Compute causal attention within documents by FlexAttention."""
    attend = _compiled() if q.device.type == "cuda" and not torch.compiler.is_compiling() else _flex_attention()
    result: Tensor = attend(q, k, v, block_mask=_block_mask(documents), enable_gqa=q.shape[1] != k.shape[1])
    return result


def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Any:
    """Return the compiled function: without compilation, FlexAttention would materialise all scores."""
    return torch.compile(_flex_attention())


_last: tuple[weakref.ref[Tensor], Any] | None = None


def _block_mask(documents: Tensor) -> Any:
    """Return the block mask of ``documents``. It is made once per microbatch, because all layers pass the same tensor."""
    global _last
    if not torch.compiler.is_compiling() and _last is not None and _last[0]() is documents:
        return _last[1]
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[batch, query] == documents[batch, key]) & (query >= key)

    batch, seq = documents.shape
    mask = create_block_mask(sees, B=batch, H=None, Q_LEN=seq, KV_LEN=seq, device=str(documents.device))
    if not torch.compiler.is_compiling():
        _last = weakref.ref(documents), mask
    return mask
