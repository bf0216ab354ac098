"""Which keys each query attends to: those at or before its position, in its document, within a window.

All attention modules of a microbatch share their masks, made before its forward pass
(:attr:`~titan_core.api.Microbatch.masks`). On CUDA devices they are block masks of FlexAttention (He et al., arXiv
2412.05496), which skips blocks that are masked completely. FlexAttention has no backward on CPUs, where a mask is a dense
tensor. Documents need no mask if variable-length attention computes them (:mod:`titan_core.api.model.packed_attention`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titan_core.api.model.layout_rules import Mixer
from titan_core.api.training.batch import Batch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128
"""Queries, and keys, of a block of FlexAttention."""


def uses_block_masks(device: torch.device) -> bool:
    """Whether masks on ``device`` are those of FlexAttention, and windows are masks rather than bands."""
    return device.type == "cuda"


def mask_name(window: int | None, chunk: int | None = None) -> str:
    """Return the name of a mask among those of a microbatch.

    Args:
        window: number of positions that a query sees; ``None``: all before it.
        chunk: the chunk of a rank's positions whose queries it has; ``None``: all of them.
    """
    of_window = "all" if window is None else f"window {window}"
    return of_window if chunk is None else f"{of_window}, chunk {chunk}"


def attention_masks(
    batch: Batch, mixers: Iterable[Mixer], columns: Tensor | None = None, length: int | None = None
) -> dict[str, Tensor | BlockMask]:
    """Return the masks, by name, of causal attention to whole sequences. Windows have none on CPUs, which compute them in
    bands. On GPUs, whole sequences with :attr:`~titan_core.api.Batch.document_ends` have only masks that these do not
    replace.

    Args:
        batch: gives documents and device.
        mixers: what attends. Without options, and without documents, it needs no mask.
        columns: index in its sequence of each query, ``[batch or 1, queries]``; ``None``: all positions, in order.
        length: positions of a whole sequence; ``None``: those of the batch's tokens.
    """
    documents, tokens = batch.documents, batch.tokens
    length = tokens.shape[1] if length is None else length
    names: dict[str, int | None] = {} if documents is None else {mask_name(None): None}
    whole = columns is None or columns.shape[1] == length
    if batch.document_ends is not None and whole and uses_block_masks(tokens.device):
        names, mixers = {}, [mixer for mixer in mixers if mixer.softcap is not None or mixer.sinks]
    for mixer in mixers:
        window = mixer.window if mixer.window is not None and mixer.window < length else None
        needed = mixer.softcap is not None or mixer.sinks if window is None else uses_block_masks(tokens.device)
        if needed:
            names[mask_name(window)] = window
    if names and documents is None:
        documents = tokens.new_zeros(1, length).expand(tokens.shape[0], -1)
    return {name: document_mask(documents, columns, window) for name, window in names.items() if documents is not None}


def attention_mask(
    q: Tensor, k: Tensor, *, documents: Tensor | None = None, columns: Tensor | None = None, window: int | None = None
) -> Tensor | BlockMask:
    """Return the mask of queries and keys, on their device.

    Args:
        q: ``[batch, heads, queries, head_dim]``.
        k: ``[batch, heads, seq, head_dim]``.
        documents: document of each key's position, ``[batch, seq]``; ``None``: one.
        columns: index among the keys of each query, ``[batch or 1, queries]``; ``None``: the queries are the last positions.
        window: number of positions that a query sees, its own included; ``None``: all.

    Returns:
        A block mask, or a boolean tensor ``[batch or 1, 1, queries, seq]``.
    """
    if columns is None:
        columns = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[None]
    if documents is None:
        # A row for each sequence: FlexAttention looks masks up by the sequence.
        documents = torch.zeros(1, k.shape[2], dtype=torch.int64, device=q.device).expand(q.shape[0], -1)
    return document_mask(documents, columns, window)


def document_mask(documents: Tensor, columns: Tensor | None = None, window: int | None = None) -> Tensor | BlockMask:
    """Return the mask of a batch on the device of ``documents``.

    Args:
        documents: document of each position of the whole sequence, ``[batch, seq]``.
        columns: index in the sequence of each query, ``[batch or 1, queries]``; ``None``: all positions, in order.
        window: number of positions that a query sees, its own included; ``None``: all.

    Returns:
        A block mask, or a boolean tensor ``[batch, 1, queries, seq]``.
    """
    if uses_block_masks(documents.device):
        return block_mask(documents, columns, window)
    order, own = _orders(documents, columns)
    distance = own[:, :, None] - order[:, None, :]
    seen = (documents.gather(1, own)[:, :, None] == documents[:, None, :]) & (distance >= 0)
    return (seen if window is None else seen & (distance < window))[:, None]


def _orders(documents: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the index of each key, and of each query, both with the batch of ``documents``."""
    order = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return order, order if columns is None else columns.expand(documents.shape[0], -1)


def block_mask(documents: Tensor, columns: Tensor | None = None, window: int | None = None) -> BlockMask:
    """Return the block mask of a batch; for the arguments see :func:`document_mask`.

    It is derived from the range of documents and positions in each block: torch's ``create_block_mask`` evaluates every pair
    of positions, in 48 GiB for a sequence of 131,072 unless it is compiled. If the ids of documents decrease along a
    sequence, more blocks are evaluated than necessary.
    """
    from torch.nn.attention.flex_attention import BlockMask

    order, own = _orders(documents, columns)
    of_queries = documents.gather(1, own)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = own[batch, query]
        return (of_queries[batch, query] == documents[batch, key]) & (place >= key)

    def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(batch, head, query, key) & (own[batch, query] - key < window)  # type: ignore[operator]

    query_low, query_high = _ranges(of_queries)
    key_low, key_high = _ranges(documents)
    (first, last), (key_first, key_last) = _ranges(own), _ranges(order)
    query_low, query_high, first, last = (bound[:, :, None] for bound in (query_low, query_high, first, last))
    key_low, key_high, key_first, key_last = (bound[:, None, :] for bound in (key_low, key_high, key_first, key_last))
    some = (query_low <= key_high) & (key_low <= query_high) & (last >= key_first)
    one_document = (query_low == query_high) & (key_low == key_high) & (query_low == key_low)
    whole = _whole(own)[:, None] & _whole(order)
    every = one_document & (first >= key_last) & whole
    if window is not None:
        some = some & (first - key_last < window)
        every = every & (last - key_first < window)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees if window is None else sees_near,
        seq_lengths=(own.shape[1], documents.shape[1]),
    )


def _ranges(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest of ``values``, ``[batch, seq]``, in each block, ``[batch, blocks]``."""
    seq = values.shape[1]
    blocks = -(-seq // _BLOCK)
    index = torch.arange(blocks * _BLOCK, device=values.device).clamp_(max=seq - 1)
    low, high = torch.aminmax(values[:, index].unflatten(1, (blocks, _BLOCK)), dim=2)
    return low, high


def _whole(values: Tensor) -> Tensor:
    """Return which blocks of ``values``, ``[batch, seq]``, are not cut off by the end of the sequence, ``[blocks]``."""
    ends = torch.arange(_BLOCK, values.shape[1] + _BLOCK, _BLOCK, device=values.device)
    return ends <= values.shape[1]


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of keys of each block of queries, and their indices first, as FlexAttention takes them."""
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], indices.int()[:, None]
