"""A kernel of torch's variable-length attention for CPUs, which torch does not have: each document by itself, in fp32.
Torch's own function, operator and gradient call it, so that what reaches the GPU's kernels is checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

calls: list[dict[str, Any]] = []
"""The arguments of each forward pass since it was last cleared."""


def register() -> None:
    """Register the kernel in this process, and forget :data:`calls`."""
    calls.clear()
    for operator, kernel in ((varlen._varlen_attn, _forward), (varlen._varlen_attn_backward, _backward)):
        if "cpu" not in operator._backend_fns:
            operator.register_kernel("cpu")(kernel)


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    bounds, bounds_of_keys, longest, longest_keys, causal, scale, window, *_ = rest
    assert longest == longest_keys and torch.equal(bounds, bounds_of_keys) and causal == (window == [-1, 0])
    calls.append({"bounds": bounds, "longest": longest, "window": window, "heads": (query.shape[1], key.shape[1])})
    documents = list(_documents(query, key, value, bounds, longest, scale, window))
    out = torch.cat([(scores.softmax(-1) @ v).transpose(0, 1) for _, _, v, scores in documents])
    logsumexp = torch.cat([scores.logsumexp(-1) for *_, scores in documents], 1)
    return out.to(query.dtype), logsumexp, torch.zeros(2, dtype=torch.uint64)


def _backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    out, _, bounds, _, longest, _, _, _, scale, window, *_ = rest
    found: list[tuple[Tensor, ...]] = []
    pieces = (one.float().split(bounds.diff().tolist()) for one in (gradient, out))
    documents = _documents(query, key, value, bounds, longest, scale, window)
    for (q, k, v, scores), g, o in zip(documents, *pieces, strict=True):
        weights, g, o = scores.softmax(-1), g.transpose(0, 1), o.transpose(0, 1)
        of_scores = weights * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * scale
        of_all = of_scores @ k, of_scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ g
        found.append(tuple(one.transpose(0, 1) for one in of_all))
    of_q, of_k, of_v = (torch.cat(one) for one in zip(*found, strict=True))
    of_k, of_v = (one.unflatten(1, (key.shape[1], -1)).sum(2) for one in (of_k, of_v))
    return of_q.to(query.dtype), of_k.to(key.dtype), of_v.to(value.dtype)


def _documents(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: list[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield of each document, by head, its queries, the keys and values that they see, and their scores."""
    assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == len(query) and query.shape[-1] % 8 == 0
    lengths = bounds.diff().tolist()
    assert min(lengths) >= 0 and max(lengths) <= longest
    for q, k, v in zip(*(one.float().split(lengths) for one in (query, key, value)), strict=True):
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1) for one in (k, v))
        q, order = q.transpose(0, 1), torch.arange(len(q))
        distance = order[:, None] - order
        hidden = (distance < 0) if window[0] < 0 else (distance < 0) | (distance > window[0])
        yield q, k, v, (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
