"""Attention with options where no fused kernel has them: on CPUs, and for the few queries of a decoding step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BAND = 64
"""Least number of queries of a band."""


def attend_densely(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention under a mask.

    Args:
        q: ``[batch, heads, queries, head_dim]``.
        k: ``[batch, heads, keys, head_dim]``, with as many heads as ``q`` or a divisor of it.
        v: like ``k``; its heads may have another width.
        seen: whether a query sees a key, boolean ``[batch or 1, 1, queries, keys]``; every query sees one.
        softcap: cap of the scores.
        scale: factor of the scores; ``None``: ``head_dim ** -0.5``.
        sinks: score of each head's sink, ``[heads]``.
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    queries = q.unflatten(1, (k.shape[1], -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (queries @ k.unsqueeze(2).transpose(-1, -2)).float()  # [batch, kv heads, group, queries, keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2)


def attend_in_bands(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, documents: Tensor | None = None, **options: Any
) -> Tensor:
    """Compute causal attention within a window, a band of queries at a time with only the keys that it may see.

    Args:
        q: ``[batch, heads, queries, head_dim]``: the last positions of ``k``, in order.
        k: ``[batch, heads, keys, head_dim]``.
        v: like ``k``.
        window: number of positions that a query sees, its own included.
        documents: document of each position of ``k``, ``[batch, keys]``.
        options: those of :func:`attend_densely`.
    """
    batch, _, queries, _ = q.shape
    first, reach = k.shape[2] - queries, window - 1
    band = min(max(window, _BAND), queries)
    count = -(-queries // band)
    before, after = max(0, reach - first), count * band - queries  # what bands reach beyond either end

    def bands_of_keys(tensor: Tensor) -> Tensor:
        """``[batch, positions, ...]`` to ``[batch, bands, ..., positions of a band]``."""
        ends = [0, 0] * (tensor.dim() - 2) + [before, after]
        padded = F.pad(tensor, ends)[:, max(0, first - reach) :]
        return padded.unfold(1, reach + band, band)

    keys, values = (bands_of_keys(tensor.transpose(1, 2)).transpose(-1, -2).flatten(0, 1) for tensor in (k, v))
    own = F.pad(q, (0, 0, 0, after)).unflatten(2, (count, band)).transpose(1, 2).flatten(0, 1)
    places = torch.arange(band, device=q.device)[:, None]
    others = torch.arange(reach + band, device=q.device) - reach
    starts = first + band * torch.arange(count, device=q.device)[:, None, None]
    # Keys before the sequence are hidden; queries behind its end see their own place, so that no softmax is empty.
    seen = ((others <= places) & (places - others < window) & (starts + others >= 0)).expand(batch, -1, -1, -1)
    if documents is not None:
        of_keys = bands_of_keys(documents)
        of_queries = of_keys[..., reach:]
        seen = seen & (of_queries[..., :, None] == of_keys[..., None, :])
    mixed = attend_densely(own, keys, values, seen.flatten(0, 1).unsqueeze(1), **options)
    return mixed.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)[:, :, :queries]
