"""Attention within a window, of a rank's chunks of each sequence: ranks send each other only the keys and values of the
positions just before each chunk that its first queries see, so what is sent and computed grows with the window and not with
the sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from titan_core.api import SequenceShare
from titan_core.api.model.attention import attend
from titan_parallel.torch_private import exchange_rows

Span = tuple[int, int]
"""Positions ``start`` to ``stop`` of a tensor."""


@dataclass(frozen=True)
class Halo:
    """The positions before the chunks of a rank that their queries see."""

    sent: tuple[tuple[Span, ...], ...]
    """For each rank, the positions among this rank's own that it needs."""
    received: tuple[int, ...]
    """How many positions each rank sends to this one."""
    keys: tuple[tuple[tuple[bool, Span], ...], ...]
    """For each chunk of this rank, the positions that its queries see, in order: whether they are this rank's own, and where
    among its own or among the received ones they are."""
    first: tuple[int, ...]
    """For each chunk, the first of these positions in the sequence."""


def attend_within_window(
    share: SequenceShare, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int, **options: Any
) -> Tensor:
    """Compute causal attention within a window from a rank's chunks of each sequence to all of it.

    Args:
        share: the chunks of each rank.
        q: ``[batch, heads, positions, head_dim]``.
        k: as ``q``, with as many heads or a divisor of it.
        v: as ``k``; its heads may have another width.
        documents: document of each position of the whole sequence, ``[batch, seq]``; ``None``: one.
        window: number of positions that a query sees, its own included.
        options: further ones of :class:`~titan_core.api.CausalAttention`.
    """
    length = q.shape[2] // len(share.own)
    halo = halo_of(share.chunks, share.mesh.get_local_rank(), length, window)
    own, others = (k, v), (k, v)
    if window > 1:
        spans = [(0, 0), *itertools.chain.from_iterable(halo.sent)]
        sent = torch.cat([torch.cat((k[:, :, start:stop], v[:, :, start:stop]), -1) for start, stop in spans], 2)
        counts = [sum(stop - start for start, stop in spans) for spans in halo.sent]
        rows = _Send.apply(sent.movedim(2, 0).contiguous(), list(halo.received), counts, share.mesh.get_group().group_name)
        others = rows.movedim(0, 2).split((k.shape[-1], v.shape[-1]), -1)
    results = []
    parts = zip(q.split(length, 2), halo.keys, halo.first, strict=True)
    for chunk, (queries, pieces, first) in enumerate(parts):
        keys, values = (
            torch.cat([(mine if is_own else received)[:, :, start:stop] for is_own, (start, stop) in pieces], 2)
            for mine, received in zip(own, others, strict=True)
        )
        seen = None if documents is None else documents[:, first : first + keys.shape[2]]
        results.append(attend(queries, keys, values, documents=seen, window=window, chunk=chunk, **options))
    return torch.cat(results, 2)


@cache
def halo_of(chunks: tuple[tuple[int, ...], ...], rank: int, length: int, window: int) -> Halo:
    """Return what ``rank`` sends and receives.

    Args:
        chunks: the chunks of each rank.
        length: positions of a chunk.
        window: number of positions that a query sees.
    """
    owner = {chunk: (other, place) for other, own in enumerate(chunks) for place, chunk in enumerate(own)}
    needed = [_needed(own, length, window) for own in chunks]

    def among_own(chunk: int, start: int, stop: int) -> Span:
        before = (owner[chunk][1] - chunk) * length
        return start + before, stop + before

    sent = tuple(tuple(among_own(*piece) for piece in of_rank if owner[piece[0]][0] == rank) for of_rank in needed)
    arriving = sorted(needed[rank], key=lambda piece: (owner[piece[0]][0], piece))
    places, end = {}, 0
    for chunk, start, stop in arriving:
        places[chunk] = end - start  # a rank receives successive positions of a chunk
        end += stop - start
    received = tuple(
        sum(stop - start for chunk, start, stop in arriving if owner[chunk][0] == other) for other in range(len(chunks))
    )
    keys, firsts = [], []
    for own in chunks[rank]:
        first = max(0, own * length - window + 1)
        pieces = []
        for chunk, start, stop in _by_chunk(first, (own + 1) * length, length):
            if owner[chunk][0] == rank:
                pieces.append((True, among_own(chunk, start, stop)))
            else:
                pieces.append((False, (start + places[chunk], stop + places[chunk])))
        keys.append(tuple(pieces))
        firsts.append(first)
    return Halo(sent, received, tuple(keys), tuple(firsts))


def _needed(own: tuple[int, ...], length: int, window: int) -> list[tuple[int, int, int]]:
    """Return the positions that a rank must receive, in order, as (chunk, start, stop): of each chunk one span, which ends
    with the chunk."""
    first: dict[int, int] = {}
    for mine in own:
        for chunk, start, _ in _by_chunk(max(0, mine * length - window + 1), mine * length, length):
            if chunk not in own:
                first[chunk] = min(start, first.get(chunk, start))
    return [(chunk, first[chunk], (chunk + 1) * length) for chunk in sorted(first)]


def _by_chunk(start: int, stop: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield the positions from ``start`` to ``stop``, as (chunk, start, stop)."""
    for chunk in range(start // length, -(-stop // length)):
        yield chunk, max(start, chunk * length), min(stop, (chunk + 1) * length)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return exchange_rows(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange_rows(gradient.contiguous(), ctx.sent, ctx.received, ctx.group), None, None, None
