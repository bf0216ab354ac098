"""Attention within packed documents by torch's variable-length attention, on GPUs: a kernel computes the documents as
sequences of their own, and no mask exists (FlashAttention 2, arXiv 2307.08691; cuDNN's since torch 2.15)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_core.api.plugins.errors import UserError
from titan_core.api.training.batch import Batch

_TYPES = (torch.bfloat16, torch.float16)
WIDEST = 256
"""Most features of a head: as many as FlashAttention takes."""


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of a microbatch, one after another over its sequences."""

    ends: Tensor
    """Their bounds, int32 ``[documents + 1]``, from 0 to the number of positions. Documents at the end of a sequence may be
    empty, so that few numbers of documents occur: kernels and compiled code are made for one."""
    longest: int
    """At least the length of the longest."""
    shape: tuple[int, int]
    """Sequences and positions of each."""
    kernel: Callable[..., Any]
    """Torch's function, which takes grouped heads."""


def packed_documents(batch: Batch) -> PackedDocuments | None:
    """Return the documents of whole sequences, without waiting for the device; ``None`` without
    :attr:`~titan_core.api.Batch.document_ends`."""
    ends, documents = batch.document_ends, batch.documents
    if ends is None or documents is None:
        return None
    rows, length = documents.shape
    starts = torch.arange(0, rows * length, length, dtype=torch.int32, device=ends.device)
    bounds = F.pad((ends + starts[:, None]).flatten(), (1, 0))
    return PackedDocuments(bounds, batch.longest_document, (rows, length), _kernel())


def is_packed(packed: PackedDocuments, q: Tensor, k: Tensor) -> bool:
    """Whether queries and keys are those of all positions of ``packed``, in half precision."""
    return (q.shape[0], q.shape[2]) == (k.shape[0], k.shape[2]) == packed.shape and q.dtype in _TYPES


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedDocuments, *, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Compute causal attention within documents.

    Args:
        q: ``[batch, heads, seq, head_dim]``.
        k: as ``q``, with as many heads or a divisor of it.
        v: as ``k``; its heads may have another width.
        packed: the documents of these positions.
        window: number of positions that a query sees, its own included; ``None``: all.
        scale: factor of the scores; ``None``: ``head_dim ** -0.5``.

    Raises:
        UserError: heads are too wide.
    """
    width, values = q.shape[-1], v.shape[-1]
    widest = max(width, values)
    if widest > WIDEST:  # of a model that has not been tried (titan_core.model.layout_trial)
        raise UserError.one('data.document_attention = "varlen"', too_wide(widest), 'set it to "flex"')
    padded = widest + -widest % 8  # kernels take one width, a multiple of 8
    rows = [F.pad(one, (0, padded - one.shape[-1])).transpose(1, 2).flatten(0, 1) for one in (q, k, v)]
    ends, longest = packed.ends, packed.longest
    seen = (-1 if window is None else window - 1, 0)
    factor = width**-0.5 if scale is None else scale
    # The same tensor of bounds twice: cuDNN's causal mask requires it.
    result: Tensor = packed.kernel(*rows, ends, ends, longest, longest, scale=factor, window_size=seen)
    return result.unflatten(0, packed.shape).transpose(1, 2)[..., :values]


def too_wide(width: int) -> str:
    """Return why heads of ``width`` features, more than :data:`WIDEST`, cannot be computed."""
    return f"heads have {width} features, and variable-length attention takes {WIDEST} at most"


@cache
def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters  # that of torch 2.11 always takes grouped heads
    return partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn
