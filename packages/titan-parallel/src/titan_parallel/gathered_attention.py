"""Attention of a rank's chunks of a sequence over the gathered keys and values of all ranks. Exact with any mask; needs
memory for one layer's keys and values of the whole sequence (arXiv 2407.21783, section 3.3.2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_core.api import SequenceShare
from titan_core.toolkit.models import attend


def attend_gathered(
    share: SequenceShare, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, **options: Any
) -> Tensor:
    """Compute causal attention from a rank's chunks of each sequence to all of it.

    Args:
        share: the chunks of each rank.
        q: ``[batch, heads, positions, head_dim]``.
        k: as ``q``, with as many heads or a divisor of it.
        v: as ``k``; its heads may have another width.
        documents: document of each position of the whole sequence, ``[batch, seq]``; ``None``: one.
        options: those of :class:`~titan_core.api.CausalAttention`.
    """
    width = max(k.shape[-1], v.shape[-1])
    both = torch.cat([F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in (k, v)], dim=1)
    keys, values = share.gather(both, dim=2).chunk(2, dim=1)  # one collective for both
    keys, values = keys[..., : k.shape[-1]], values[..., : v.shape[-1]]
    order = torch.arange(keys.shape[2], device=q.device)[None]
    columns = share.take(order if documents is None else order.expand_as(documents), 1)
    return attend(q, keys, values, documents=documents, columns=columns, **options)
