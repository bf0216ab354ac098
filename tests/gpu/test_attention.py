"""Attention on a GPU equals softmax attention computed with a dense mask, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.on_device import relative_error
from titan_core.api import CausalAttention
from titan_parallel.ring_attention import attend_gathered

pytestmark = pytest.mark.gpu

BATCH, HEADS, SEQ, WIDTH = 2, 4, 256, 32
# Rounding of operands: fp32 sums over 256 keys, and 8 bits of mantissa in bf16.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


def reference(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Return attention in fp64, in which each position attends to earlier ones of its document and to itself."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    place = torch.arange(q.shape[2], device=q.device)
    seen = place[:, None] >= place[None, :]
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v


def inputs(device: torch.device, dtype: torch.dtype, kv_heads: int) -> list[Tensor]:
    """Return queries, keys, values and a gradient, drawn on the CPU."""
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, kv_heads, kv_heads, HEADS)
    return [torch.randn(BATCH, heads, SEQ, WIDTH, generator=generator).to(device, dtype) for heads in sizes]


def packed(device: torch.device) -> Tensor:
    """Return documents of lengths that are no multiple of a kernel's tile."""
    ends = torch.tensor([[1, 100, 101, 230], [7, 128, 129, 255]])
    return (torch.arange(SEQ)[None, :, None] >= ends[:, None, :]).sum(-1).to(device)


def compared(attend: Any, tensors: list[Tensor], documents: Tensor | None, tolerance: float) -> None:
    """Assert that ``attend`` equals :func:`reference` in output and gradients."""
    *operands, gradient = tensors
    mine = [tensor.clone().requires_grad_() for tensor in operands]
    exact = [tensor.clone().requires_grad_() for tensor in operands]
    output, expected = attend(*mine, documents), reference(*exact, documents)
    output.backward(gradient)
    expected.backward(gradient.double())
    assert relative_error(output.detach(), expected.detach()) < tolerance
    for found, right in zip(mine, exact, strict=True):
        assert found.grad is not None and right.grad is not None
        assert relative_error(found.grad, right.grad) < 2 * tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
def test_the_mixer_is_softmax_attention(device: torch.device, dtype: torch.dtype, kv_heads: int, masked: bool) -> None:
    documents = packed(device) if masked else None
    compared(CausalAttention(), inputs(device, dtype, kv_heads), documents, TOLERANCE[dtype])


class OneRanksShare:
    """What attention of a rank needs of a :class:`~titan_core.api.SequenceShare`, without other ranks: their
    keys and values are at hand."""

    def __init__(self, rank: int, size: int, whole: Tensor) -> None:
        self.own, self._whole = (rank, 2 * size - 1 - rank), whole
        self.chunks = tuple((chunk, 2 * size - 1 - chunk) for chunk in range(size))

    def gather(self, share: Tensor, dim: int) -> Tensor:
        assert share.shape[dim] * len(self.chunks) == self._whole.shape[dim]
        return self._whole

    def take(self, whole: Tensor, dim: int) -> Tensor:
        pieces = whole.chunk(2 * len(self.chunks), dim)
        return torch.cat([pieces[chunk] for chunk in self.own], dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_divided_documents_attend_as_whole_ones(device: torch.device, dtype: torch.dtype, ranks: int) -> None:
    """The attention of each context-parallel rank, one after another in this process."""

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        keys_and_values = torch.cat((k, v), dim=1)
        pieces: list[Tensor | None] = [None] * (2 * ranks)
        for rank in range(ranks):
            share: Any = OneRanksShare(rank, ranks, keys_and_values)
            mine = attend_gathered(share, *(share.take(tensor, 2) for tensor in (q, k, v)), documents)
            for chunk, piece in zip(share.own, mine.chunk(2, dim=2), strict=True):
                pieces[chunk] = piece
        return torch.cat([piece for piece in pieces if piece is not None], dim=2)

    compared(attend, inputs(device, dtype, 2), packed(device), TOLERANCE[dtype])
