"""Attention of a rank's chunks of a sequence over the gathered keys and values of all ranks. Exact, on any backend; needs
memory for one layer's keys and values of the whole sequence (arXiv 2407.21783, section 3.3.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_core.api.attention import causal_mask
from titan_core.api.sequence_share import SequenceShare


class GatheredAttention:
    """Causal attention of a rank's chunks of each sequence."""

    def __init__(self, share: SequenceShare) -> None:
        self._share = share

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attend as a model's mixer does.

        Args:
            q: ``[batch, heads, positions, head_dim]``.
            k: as ``q``, with as many heads or fewer.
            v: as ``k``.
            documents: document of each position of the whole sequence, ``[batch, seq]``.
        """
        keys, values = self._share.gather(torch.cat((k, v), dim=1), dim=2).chunk(2, dim=1)  # one collective for both
        chunks = self._share.own
        pieces = zip(q.chunk(len(chunks), dim=2), chunks, strict=True)
        return torch.cat([_attend(piece, keys, values, chunk, documents) for piece, chunk in pieces], dim=2)


def _attend(q: Tensor, keys: Tensor, values: Tensor, chunk: int, documents: Tensor | None) -> Tensor:
    """Attend from the queries of chunk number ``chunk`` to all positions up to their own."""
    length = q.shape[2]
    first, end = chunk * length, (chunk + 1) * length
    keys, values, grouped = keys[:, :, :end], values[:, :, :end], q.shape[1] != keys.shape[1]
    if documents is not None:
        mask = causal_mask(documents[:, first:end], documents[:, :end], first)
    elif chunk == 0:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=grouped)
    else:
        mask = torch.ones(length, end, dtype=torch.bool, device=q.device).tril(first)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=grouped)
