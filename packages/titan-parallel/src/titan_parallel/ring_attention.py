"""Attention of a rank's chunks of a sequence over the keys and values of all ranks.

Ring attention: each rank attends from its own positions to those of one rank after another, and merges the results (Liu
et al., arXiv 2310.01889; merging by logsumexp: Dao, arXiv 2307.08691, section 2.3).

A rank holds one chunk from the front of each sequence and its mirror from the back. It therefore attends to

* its own positions causally;
* the front chunk of an earlier rank, from all of its positions;
* all positions of a later rank, from its own back chunk.

Each of these steps but the first is half a square of scores, on every rank. The fused kernels behind
``scaled_dot_product_attention`` compute them, on CPUs too.

:func:`attend_gathered` gathers keys and values instead. It is exact with any mask, and needs memory for one layer's keys and
values of the whole sequence (arXiv 2407.21783, section 3.3.2).

Forward and backward of the ring are operators (:func:`torch.library.custom_op`): the compiler does not look into them, and
selective recomputation keeps the merged result, not that of each step.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_core.api import SequenceShare
from titan_core.api.model.attention import attend
from titan_core.toolkit.simulation import COMPOSED
from titan_parallel.torch_private import attention_kernel, process_group

_WHOLE = slice(None)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, group: str, passed: bool
) -> tuple[Tensor, Tensor]:
    """Compute causal attention over the positions of all ranks.

    Args:
        q: ``[batch, heads, positions, head_dim]``: this rank's chunk from the front of each sequence, and its mirror.
        k: as ``q``, with as many heads or a divisor of it.
        v: as ``k``.
        sinks: score of each head's sink, a key that every query sees and that has no value, ``[heads]``.
        scale: factor of the scores.
        group: name of the process group that shares the sequences.
        passed: whether keys and values pass from rank to rank. Otherwise they are gathered once, which takes the memory of
            the whole sequence's.

    Returns:
        The result, like ``q``, and the logsumexp of each query's scores, that of its sink included, fp32, ``[batch, heads,
        positions]``.
    """
    ranks, kernel = process_group(group), attention_kernel(q, k)
    held = (_Passed if passed else _Gathered)(torch.stack((k, v)), ranks)
    merged = torch.empty_like(q, dtype=torch.float32)
    logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
    for step in range(ranks.size()):
        keys, values = held.at(step)
        queries, seen = _parts(step, ranks.rank(), q.shape[2])
        part, scores = kernel.forward(q[:, :, queries], keys[:, :, seen], values[:, :, seen], step == 0, scale)
        if step == 0:
            merged.copy_(part)
            logsumexp.copy_(scores)
        else:
            _merge(merged[:, :, queries], logsumexp[:, :, queries], part, scores)
    if sinks is not None:
        # One more addend of each softmax's denominator. The kernels' backward is exact with this result and logsumexp.
        sink = sinks.float()[:, None]
        merged *= torch.sigmoid(logsumexp - sink).unsqueeze(-1)
        logsumexp = torch.logaddexp(logsumexp, sink)
    return torch.empty_like(q).copy_(merged), logsumexp


def _attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    group: str,
    passed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``q``, ``k``, ``v`` and ``sinks`` (empty, if there are none), given that of the result. They
    are summed in fp32."""
    ranks, kernel = process_group(group), attention_kernel(q, k)
    held = (_Passed if passed else _Gathered)(torch.stack((k, v)), ranks)
    sums = (_PassedSums if passed else _GatheredSums)(k, ranks)
    grad_q = torch.zeros_like(q, dtype=torch.float32)
    for step in range(ranks.size()):
        keys, values = held.at(step)
        queries, seen = _parts(step, ranks.rank(), q.shape[2])
        of_q, of_k, of_v = kernel.backward(
            gradient[:, :, queries],
            q[:, :, queries],
            keys[:, :, seen],
            values[:, :, seen],
            out[:, :, queries],
            logsumexp[:, :, queries].contiguous(),
            step == 0,
            scale,
        )
        grad_q[:, :, queries] += of_q
        sums.add(step, seen, of_k, of_v)
    grad_k, grad_v = sums.own()
    grad_sinks = q.new_empty(0)
    if sinks is not None:
        share = torch.exp(sinks.float()[:, None] - logsumexp)  # of the sink in each softmax
        grad_sinks = -(share * (gradient.float() * out.float()).sum(-1)).sum((0, 2)).to(sinks.dtype)
    of_q, of_k, of_v = (torch.empty_like(like).copy_(found) for like, found in ((q, grad_q), (k, grad_k), (v, grad_v)))
    return of_q, of_k, of_v, grad_sinks


ring_attention = torch.library.custom_op("titan_parallel::ring_attention", _attend, mutates_args=())

ring_attention_backward = torch.library.custom_op(
    "titan_parallel::ring_attention_backward", _attend_backward, mutates_args=()
)
RING_ATTENTION: Final = torch.ops.titan_parallel.ring_attention.default
COMPOSED[RING_ATTENTION] = _attend
COMPOSED[torch.ops.titan_parallel.ring_attention_backward.default] = _attend_backward


@ring_attention.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@ring_attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), of_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, sinks, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: recomputation allows no more
    *of_tensors, of_sinks = ring_attention_backward(gradient, *saved, *ctx.options)
    return *of_tensors, None if saved[3] is None else of_sinks, None, None, None


ring_attention.register_autograd(_backward, setup_context=_save)


def _parts(step: int, rank: int, length: int) -> tuple[slice, slice]:
    """Return the queries that see keys of the rank that is ``step`` ranks before this one, and the keys that they see."""
    if step == 0:
        return _WHOLE, _WHOLE
    front, back = slice(0, length // 2), slice(length // 2, length)
    return (_WHOLE, front) if step <= rank else (back, _WHOLE)


def _merge(merged: Tensor, logsumexp: Tensor, part: Tensor, scores: Tensor) -> None:
    """Add to the result so far, in place, that of further keys."""
    total = torch.logaddexp(logsumexp, scores)
    merged.lerp_(part.to(merged.dtype), (scores - total).exp_().unsqueeze(-1))
    logsumexp.copy_(total)


class _Held(Protocol):
    """The keys and values of all ranks, one rank at a time."""

    def at(self, step: int) -> Tensor:
        """Return those of the rank that is ``step`` ranks before this one, ``[2, batch, heads, positions, head_dim]``."""
        ...


class _Gathered:
    """Gathered at once, while this rank attends to its own."""

    def __init__(self, own: Tensor, ranks: dist.ProcessGroup) -> None:
        self._own, self._ranks = own, ranks
        self._all = own.new_empty(ranks.size() * len(own), *own.shape[1:])
        self._work = _started(dist.all_gather_into_tensor(self._all, own, group=ranks, async_op=True))

    def at(self, step: int) -> Tensor:
        if step == 0:
            return self._own
        if step == 1:
            self._work.wait()
        return self._all.view(-1, *self._own.shape)[(self._ranks.rank() - step) % self._ranks.size()]


class _Passed:
    """Passed on to the next rank while this rank attends to them."""

    def __init__(self, own: Tensor, ranks: dist.ProcessGroup) -> None:
        self._held, self._ranks = own, ranks
        self._next: tuple[Tensor, dist.Work] | None = None

    def at(self, step: int) -> Tensor:
        if self._next is not None:
            self._held, work = self._next
            work.wait()
        self._next = _pass_on(self._held, self._ranks) if step < self._ranks.size() - 1 else None
        return self._held


class _GatheredSums:
    """The gradients of all keys and values, summed over ranks at the end."""

    def __init__(self, keys: Tensor, ranks: dist.ProcessGroup) -> None:
        self._ranks = ranks
        self._all = keys.new_zeros(ranks.size(), 2, *keys.shape, dtype=torch.float32)

    def add(self, step: int, seen: slice, of_k: Tensor, of_v: Tensor) -> None:
        sums = self._all[(self._ranks.rank() - step) % self._ranks.size()]
        for total, part in zip(sums, (of_k, of_v), strict=True):
            total[:, :, seen] += part

    def own(self) -> Tensor:
        own = torch.empty_like(self._all[0])
        dist.reduce_scatter_tensor(own, self._all.flatten(0, 1), group=self._ranks)
        return own


class _PassedSums:
    """The gradients of keys and values, which travel with them, and one step further: home."""

    def __init__(self, keys: Tensor, ranks: dist.ProcessGroup) -> None:
        self._ranks = ranks
        self._next = keys.new_zeros(2, *keys.shape, dtype=torch.float32)
        self._work: dist.Work | None = None

    def add(self, step: int, seen: slice, of_k: Tensor, of_v: Tensor) -> None:
        sums = self.own()
        for total, part in zip(sums, (of_k, of_v), strict=True):
            total[:, :, seen] += part
        self._next, self._work = _pass_on(sums, self._ranks)

    def own(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._next


def _pass_on(tensor: Tensor, ranks: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start sending ``tensor`` to the next rank. Return the buffer for the previous one's, and the work to await."""
    rank, size, rows = ranks.rank(), ranks.size(), len(tensor)
    received = torch.empty_like(tensor)
    outgoing = [rows if other == (rank + 1) % size else 0 for other in range(size)]
    incoming = [rows if other == (rank - 1) % size else 0 for other in range(size)]
    return received, _started(dist.all_to_all_single(received, tensor, incoming, outgoing, group=ranks, async_op=True))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "ranks outside the group do not call this"
    return work


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
