"""Causal attention, over whole sequences or inside of the documents that are packed into them."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Softmax attention in which each position sees itself and those before it, of its own document: a mixer, as
    :class:`~titan_core.api.layout.ModelLayout` wants them, that models may use.

    Whole sequences go through ``scaled_dot_product_attention``. So do documents, with a mask, but on CUDA devices, where
    FlexAttention (He et al., arXiv 2412.05496) leaves out the blocks in which nothing is seen; it has no backward on CPUs.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """
        Args:
            q: ``[batch, heads, seq, head_dim]``.
            k: the like, with as many heads or with fewer that divide them (grouped queries).
            v: as ``k``.
            documents: of each position its document, ``[batch, seq]``; ``None``: one for all.
        """
        grouped = q.shape[1] != k.shape[1]
        if documents is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if q.device.type == "cuda":
            return flex(q, k, v, documents)
        mask = seen(documents, documents)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def seen(of_queries: Tensor, of_keys: Tensor, first: int = 0) -> Tensor:
    """What each query sees of the keys: those at or before its position, in its document.

    Args:
        of_queries: documents, ``[batch, queries]``.
        of_keys: documents of the positions from 0 on, ``[batch, keys]``.
        first: position of the first query.

    Returns:
        A boolean mask, ``[batch, 1, queries, keys]``.
    """
    same = of_queries[:, :, None] == of_keys[:, None, :]
    return same.tril(first)[:, None]


def flex(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """The same by FlexAttention."""
    attend = _compiled() if q.device.type == "cuda" and not torch.compiler.is_compiling() else _flex_attention()
    result: Tensor = attend(q, k, v, block_mask=_block_mask(documents), enable_gqa=q.shape[1] != k.shape[1])
    return result


def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Any:
    """Uncompiled, it would write out every score."""
    return torch.compile(_flex_attention())


_last: tuple[weakref.ref[Tensor], Any] | None = None


def _block_mask(documents: Tensor) -> Any:
    """Made once a batch: all layers of a microbatch come with the same tensor."""
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
