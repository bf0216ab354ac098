"""Causal attention over whole sequences, or within the documents packed into them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api.model.decoding import current_decoding
from titan_core.api.model.document_mask import document_mask
from titan_core.api.parallel.microbatch import current_microbatch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class CausalAttention(nn.Module):
    """Causal softmax attention, in which each position attends to earlier positions of its document and to itself. Models
    may use it as a mixer (:class:`~titan_core.api.ModelLayout`).

    It calls ``scaled_dot_product_attention``, with a mask if documents are given, or FlexAttention on CUDA devices.
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
        if documents is not None:
            return attend_within_documents(q, k, v, documents)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def attend_within_documents(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, columns: Tensor | None = None) -> Tensor:
    """Compute causal attention within documents, by the mask of the current microbatch if there is one.

    Args:
        q: ``[batch, heads, queries, head_dim]``.
        k: ``[batch, heads, seq, head_dim]``: all positions of the sequence, in order; with as many heads as ``q`` or a
            divisor of it.
        v: like ``k``.
        documents: document of each position of the sequence, ``[batch, seq]``.
        columns: index in the sequence of each query, ``[batch, queries]``; ``None``: all positions, in order.
    """
    microbatch = current_microbatch()
    mask = None if microbatch is None else microbatch.document_mask
    mask = document_mask(documents, columns) if mask is None else mask
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return flex_attend(q, k, v, mask)


def flex_attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Compute attention by FlexAttention, compiled on CUDA devices."""
    attend = _compiled() if q.device.type == "cuda" and not torch.compiler.is_compiling() else _flex_attention()
    result: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return result


def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Any:
    """Return the compiled function: without compilation, FlexAttention would materialise all scores."""
    # As one operator, so that selective recomputation can keep its results.
    return torch.compile(_flex_attention(), options={"wrap_inductor_compiled_regions": True})
