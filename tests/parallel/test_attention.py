"""Attention on divided sequences equals attention on one device, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.gloo_pool import GlooPool
from titan_core.api import Batch, SequenceShare
from titan_parallel.context_parallel import DividedAttention, HeadAndTail


@contextmanager
def mesh_of_all() -> Iterator[DeviceMesh]:
    """Yield a one-dimensional mesh of all processes."""
    dist.init_process_group("gloo")
    try:
        yield init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    finally:
        dist.destroy_process_group()


def share(whole: Tensor, rank: int, size: int, dim: int) -> Tensor:
    """Return a rank's chunks: one from the front, and its mirror from the back."""
    chunks = whole.chunk(2 * size, dim=dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=dim)


def divided_attention(
    kv_heads: int, documents: Tensor | None, passed: bool, width: int = 8, compiled: bool = False
) -> float:
    """Return the largest error of this rank's outputs and gradients."""
    with mesh_of_all() as mesh:
        rank, size = mesh.get_local_rank(), mesh.size()
        generator = torch.Generator().manual_seed(0)
        q, k, v, g = (torch.randn(2, heads, 16, width, generator=generator) for heads in (4, kv_heads, kv_heads, 4))
        whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        seen = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
        expected = F.scaled_dot_product_attention(*whole, attn_mask=seen, enable_gqa=True)
        (expected * g).sum().backward()
        mine = [share(tensor, rank, size, 2).clone().requires_grad_() for tensor in (q, k, v)]
        chunks = tuple((chunk, 2 * size - 1 - chunk) for chunk in range(size))
        attention = DividedAttention(SequenceShare(mesh, chunks), passed)
        output = attention.forward(*mine, documents=documents)
        assert torch.equal(output, attention.forward(*mine, documents))
        if compiled:
            output = torch.compile(attention.forward, backend="aot_eager", fullgraph=True)(*mine, documents)
        (output * share(g, rank, size, 2)).sum().backward()
        errors = [(output - share(expected, rank, size, 2)).abs().max()]
        for local, full in zip(mine, whole, strict=True):
            assert local.grad is not None and full.grad is not None
            errors.append((local.grad - share(full.grad, rank, size, 2)).abs().max())
        return float(torch.stack(errors).max())


@pytest.mark.parametrize("kv_heads", [pytest.param(4, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("method", ["allgather", "alltoall", "documents"])
def test_divided_sequences_attend_as_whole_ones(gloo: GlooPool, kv_heads: int, method: str) -> None:
    documents = torch.tensor([[0] * 5 + [1] * 6 + [2] * 5, [0] * 3 + [1] * 13]) if method == "documents" else None
    for ranks in (2, 4):
        assert max(gloo.run(ranks, divided_attention, kv_heads, documents, method == "alltoall")) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_eight_ranks_attend_as_one(gloo: GlooPool, method: str) -> None:
    assert max(gloo.run(8, divided_attention, 2, None, method == "alltoall")) < 2e-6


@pytest.mark.parametrize("method", ["allgather", pytest.param("documents", marks=pytest.mark.full)])
def test_the_compiler_does_not_look_into_the_ring(gloo: GlooPool, method: str) -> None:
    documents = torch.arange(16).expand(2, -1) // 5 if method == "documents" else None
    assert max(gloo.run(2, divided_attention, 2, documents, False, 8, True)) < 2e-6


def test_heads_of_any_width_are_divided(gloo: GlooPool) -> None:
    assert max(gloo.run(2, divided_attention, 2, None, False, 6)) < 2e-6


def test_every_rank_has_a_chunk_from_the_front_and_one_from_the_back() -> None:
    whole = Batch(torch.arange(12)[None], torch.arange(12)[None] + 1, documents=torch.arange(12)[None] // 5)
    shares = [HeadAndTail(rank, 3)(whole) for rank in range(3)]
    assert [part.tokens[0].tolist() for part in shares] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    for part in shares:
        assert part.positions is not None and torch.equal(part.positions, part.tokens)
        assert torch.equal(part.targets, part.tokens + 1)
        assert part.documents is whole.documents
    explicit: Any = HeadAndTail(1, 3)(Batch(whole.tokens, whole.targets, positions=whole.tokens * 2))
    assert explicit.positions[0].tolist() == [4, 6, 16, 18]
