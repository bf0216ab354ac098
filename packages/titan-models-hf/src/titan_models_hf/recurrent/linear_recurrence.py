"""Recurrences with a matrix as state, chunk by chunk: gated linear attention as in Mamba-2 (Dao and Gu, arXiv 2405.21060)
and the gated delta rule (Yang et al., arXiv 2412.06464).

With a query, key and value of each position, and a decay ``0 < a <= 1``, the state of a head, ``[key width, value width]``,
is updated at each position, and read::

    state = a * state + key (value)^T                                # gated linear attention
    state = a * state + beta * key (value - a * state^T key)^T       # the gated delta rule
    result = state^T query

Within a chunk, all positions are computed at once, and chunks one after another. The updates of the delta rule within a
chunk solve a triangular system (Yang et al., arXiv 2406.06484, section 3.2).

Shapes: B batch, H heads, N chunks, C positions of a chunk, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_core.api import SequenceShare, current_decoding

CHUNK = 64
"""Positions of a chunk."""
NO_DOCUMENT = -1
"""The document before the first position of a sequence: no position's, so the zero state before it is never read."""


class State(NamedTuple):
    """What earlier positions leave."""

    matrix: Tensor
    """fp32, B H K V."""
    document: Tensor | None
    """The document that it belongs to, ``[batch]``; ``None``: each sequence is one document."""


def recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    documents: Tensor | None = None,
    state: State | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, State]:
    """Compute the recurrence over a sequence, in fp32. The state is reset where a document begins.

    Args:
        query: ``[batch, seq, heads, key width]``.
        key: like ``query``.
        value: ``[batch, seq, heads, value width]``.
        log_decay: logarithm of the decay, ``[batch, seq, heads]``, at most 0.
        beta: step size of the delta rule, ``[batch, seq, heads]``; ``None``: gated linear attention.
        documents: document of each position, ``[batch, seq]``.
        state: that before the first position; ``None``: zero.
        chunk: positions that are computed at once.

    Returns:
        The results, fp32, like ``value``, and the state after the last position.
    """
    seq = query.shape[1]
    size = min(chunk, seq)
    padding = -seq % size

    def chunks(tensor: Tensor) -> Tensor:
        """``[batch, seq, heads, ...]`` to B H N C ..., with zeros behind the end, which change no state."""
        tensor = tensor.float().transpose(1, 2)
        return F.pad(tensor, (0, 0) * (tensor.dim() - 3) + (0, padding)).unflatten(2, (-1, size))

    query, key, value, total = chunks(query), chunks(key), chunks(value), chunks(log_decay).cumsum(-1)
    matrix = query.new_zeros(*query.shape[:2], query.shape[-1], value.shape[-1]) if state is None else state.matrix
    ids = None
    if documents is not None:
        before = documents.new_full(documents[:, 0].shape, NO_DOCUMENT)
        before = before if state is None or state.document is None else state.document
        ids = _Documents(torch.cat((documents, documents[:, -1:].expand(-1, padding)), dim=1), before, size)
    # How much of an earlier position of the chunk is left at a position: B H N C C.
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    hidden = later if ids is None else later | ~ids.together
    left = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(hidden, -torch.inf).exp()
    since_start, until_end = total.exp(), (total[..., -1:] - total).exp()
    carried = since_start[..., -1]
    if ids is not None:  # of a document that ends within a chunk, nothing is left at its end
        since_start, until_end, carried = since_start * ids.continue_state, until_end * ids.reach_end, carried * ids.carry
    update, read = value, None
    if beta is not None:
        scaled = key * chunks(beta).unsqueeze(-1)
        system = (scaled @ key.transpose(-1, -2)) * left
        update = torch.linalg.solve_triangular(system, value * chunks(beta).unsqueeze(-1), upper=False, unitriangular=True)
        read = torch.linalg.solve_triangular(system, scaled * since_start.unsqueeze(-1), upper=False, unitriangular=True)
    scores = (query @ key.transpose(-1, -2)) * left
    query, key = query * since_start.unsqueeze(-1), key * until_end.unsqueeze(-1)
    results = []
    for index in range(query.shape[2]):
        new = update[:, :, index] if read is None else update[:, :, index] - read[:, :, index] @ matrix
        results.append(query[:, :, index] @ matrix + scores[:, :, index] @ new)
        matrix = carried[:, :, index, None, None] * matrix + key[:, :, index].transpose(-1, -2) @ new
    result = torch.stack(results, dim=2).flatten(2, 3)[:, :, :seq].transpose(1, 2)
    return result, State(matrix, None if documents is None else documents[:, -1])


class _Documents:
    """Which positions of a chunk share documents: with each other, with the state before the chunk, with the chunk's end."""

    def __init__(self, ids: Tensor, before: Tensor, size: int) -> None:
        """
        Args:
            ids: document of each position, ``[batch, padded seq]``.
            before: document of the state before the first one, ``[batch]``.
        """
        chunks = ids.unflatten(1, (-1, size))[:, None]  # B 1 N C
        ends = chunks[..., -1]
        starts = torch.cat((before[:, None, None], ends[..., :-1]), dim=-1)
        self.together = chunks.unsqueeze(-1) == chunks.unsqueeze(-2)
        self.continue_state = chunks == starts.unsqueeze(-1)
        self.reach_end = chunks == ends.unsqueeze(-1)
        self.carry = starts == ends


class LinearRecurrence(nn.Module):
    """A mixer that computes :func:`recurrence`, also for generation."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the results, like ``value``. For the arguments see :func:`recurrence`."""
        decoding = current_decoding()
        if decoding is None:
            return recurrence(query, key, value, log_decay, beta, documents)[0].to(value.dtype)
        kept, real = decoding.state(self), decoding.real[..., None]
        # Padding leaves the state as it is.
        key = key.masked_fill(~real[..., None], 0.0)
        log_decay = log_decay.masked_fill(~real, 0.0)
        before = State(kept["matrix"], None) if "matrix" in kept else None
        result, after = recurrence(query, key, value, log_decay, beta, None, before)
        kept["matrix"] = after.matrix
        return result.to(value.dtype)


def divided(module: LinearRecurrence, share: SequenceShare) -> Callable[..., Tensor]:
    """Return the mixer's forward if each rank has some chunks of every sequence.

    Each rank computes its chunks from a zero state and, along with them, what any earlier state would add: the recurrence is
    linear in its state. Ranks exchange the two matrices of each chunk.
    """

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        own, width = len(share.own), key.shape[-1]
        ids = starts = None
        if documents is not None:
            starts = torch.stack([_before(documents, share, chunk) for chunk in share.own])
            ids = share.take(documents, dim=1).chunk(own, dim=1)
        # An identity as state, whose values are zero: its results are factors of the state before the chunk.
        extended = torch.cat((value, value.new_zeros(*key.shape)), dim=-1)
        first = key.new_zeros(key.shape[0], key.shape[2], width, value.shape[-1] + width, dtype=torch.float32)
        first[..., value.shape[-1] :] = torch.eye(width, device=key.device)
        chunks = zip(*(tensor.chunk(own, dim=1) for tensor in (query, key, extended, log_decay)), strict=True)
        betas: Sequence[Tensor | None] = [None] * own if beta is None else beta.chunk(own, dim=1)
        found = []
        for number, (q, k, v, a) in enumerate(chunks):
            before_chunk = State(first, None if starts is None else starts[number])
            found.append(recurrence(q, k, v, a, betas[number], None if ids is None else ids[number], before_chunk))
        ends = torch.stack([state.matrix for _, state in found], dim=1)  # [batch, chunks, heads, K, V + K]
        every = share.gather(ends, dim=1)
        state = torch.zeros_like(every[:, 0, :, :, : value.shape[-1]])
        before = []
        for chunk in range(every.shape[1]):
            before.append(state)
            added, factor = every[:, chunk].split((value.shape[-1], width), dim=-1)
            state = added + factor @ state
        results = []
        for chunk, (result, _) in zip(share.own, found, strict=True):
            added, factor = result.split((value.shape[-1], width), dim=-1)  # [batch, seq, heads, V], [.., K]
            results.append(added + torch.einsum("bshk,bhkv->bshv", factor, before[chunk]))
        return torch.cat(results, dim=1).to(value.dtype)

    return forward


def _before(documents: Tensor, share: SequenceShare, chunk: int) -> Tensor:
    """Return the document of the position before a chunk, ``[batch]``."""
    size = documents.shape[1] // sum(map(len, share.chunks))
    return documents[:, chunk * size - 1] if chunk else torch.full_like(documents[:, 0], NO_DOCUMENT)
