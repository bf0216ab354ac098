"""Attention of a rank's chunks of a sequence over the gathered keys and values of all ranks. Exact with any mask; needs
memory for one layer's keys and values of the whole sequence (arXiv 2407.21783, section 3.3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from titan_core.api import SequenceShare
from titan_core.toolkit.models import attend_within_documents


def attend_gathered(share: SequenceShare, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Compute causal attention within documents from a rank's chunks of each sequence to all of it.

    Args:
        share: the chunks of each rank.
        q: ``[batch, heads, positions, head_dim]``.
        k: as ``q``, with as many heads or a divisor of it.
        v: as ``k``.
        documents: document of each position of the whole sequence, ``[batch, seq]``.
    """
    keys, values = share.gather(torch.cat((k, v), dim=1), dim=2).chunk(2, dim=1)  # one collective for both
    order = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return attend_within_documents(q, keys, values, documents, share.take(order, 1))
