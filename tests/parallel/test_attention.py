"""Attention on divided sequences equals attention on one device, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.gloo_pool import GlooPool
from harness.quick import rows
from titan_core.api import Batch, CausalAttention, SequenceShare, causal_attention
from titan_parallel.context_parallel import DividedAttention, HeadAndTail, attention_by_heads, head_and_tail
from titan_parallel.head_exchange import HeadExchange
from titan_parallel.region_collectives import Ranks


@contextmanager
def mesh_of_all(by_heads: int) -> Iterator[DeviceMesh]:
    """Yield a mesh of all processes: rings, and within them the ranks that trade heads for positions."""
    dist.init_process_group("gloo")
    try:
        size = int(os.environ["WORLD_SIZE"])
        yield init_device_mesh("cpu", (size // by_heads, by_heads), mesh_dim_names=("rings", "heads"))
    finally:
        dist.destroy_process_group()


def attention_on(mesh: DeviceMesh, passed: bool) -> Callable[..., Tensor]:
    """Return the attention of a job whose sequences ``mesh`` divides."""
    rings, heads = mesh["rings"], mesh["heads"]
    share = SequenceShare(rings, head_and_tail(rings.size()))
    attend = CausalAttention().forward if rings.size() == 1 else DividedAttention(share, causal_attention(4), passed).forward
    return attend if heads.size() == 1 else attention_by_heads(HeadExchange(Ranks(heads)), attend)


def share(whole: Tensor, rank: int, size: int, dim: int) -> Tensor:
    """Return a rank's chunks: one from the front, and its mirror from the back."""
    chunks = whole.chunk(2 * size, dim=dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=dim)


def divided_attention(
    kv_heads: int,
    documents: Tensor | None,
    passed: bool,
    width: int = 8,
    compiled: bool = False,
    by_heads: int = 1,
    heads: int = 4,
) -> float:
    """Return the largest error of this rank's outputs and gradients."""
    with mesh_of_all(by_heads) as mesh:
        rank, size = dist.get_rank(), mesh.size()
        generator = torch.Generator().manual_seed(0)
        q, k, v, g = (torch.randn(2, count, 16, width, generator=generator) for count in (heads, kv_heads, kv_heads, heads))
        whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        seen = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
        expected = F.scaled_dot_product_attention(*whole, attn_mask=seen, enable_gqa=True)
        (expected * g).sum().backward()
        mine = [share(tensor, rank, size, 2).clone().requires_grad_() for tensor in (q, k, v)]
        attend = attention_on(mesh, passed)
        output = attend(*mine, documents=documents)
        assert torch.equal(output, attend(*mine, documents))
        if compiled:
            output = torch.compile(attend, backend="aot_eager", fullgraph=True)(*mine, documents)
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


BY_HEADS = {
    f"{ranks} ranks, {by_heads} by heads, {heads}/{kv_heads} heads, {method}": (ranks, by_heads, heads, kv_heads, method)
    for ranks, by_heads in ((2, 2), (4, 4), (4, 2), (8, 4), (8, 2))
    for heads, kv_heads in ((4, 4), (4, 2), (4, 1), (12, 3))
    for method in ("allgather", "alltoall", "documents")
}


@pytest.mark.parametrize(
    "case",
    rows(
        BY_HEADS,
        (
            "2 ranks, 2 by heads, 4/2 heads, allgather",
            "4 ranks, 4 by heads, 4/2 heads, documents",
            "4 ranks, 2 by heads, 12/3 heads, alltoall",
            "4 ranks, 2 by heads, 4/1 heads, documents",
        ),
    ),
)
def test_ranks_that_trade_heads_for_positions_attend_as_one(gloo: GlooPool, case: str) -> None:
    ranks, by_heads, heads, kv_heads, method = BY_HEADS[case]
    documents = torch.tensor([[0] * 5 + [1] * 6 + [2] * 5, [0] * 3 + [1] * 13]) if method == "documents" else None
    passed = method == "alltoall"
    assert max(gloo.run(ranks, divided_attention, kv_heads, documents, passed, 8, False, by_heads, heads)) < 4e-6


@pytest.mark.full
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_eight_ranks_attend_as_one(gloo: GlooPool, method: str) -> None:
    assert max(gloo.run(8, divided_attention, 2, None, method == "alltoall")) < 2e-6


@pytest.mark.parametrize("method", ["allgather", pytest.param("documents", marks=pytest.mark.full)])
@pytest.mark.parametrize("by_heads", [1, 2])
def test_the_compiler_does_not_look_into_the_ring(gloo: GlooPool, method: str, by_heads: int) -> None:
    documents = torch.arange(16).expand(2, -1) // 5 if method == "documents" else None
    assert max(gloo.run(2, divided_attention, 2, documents, False, 8, True, by_heads)) < 2e-6


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
