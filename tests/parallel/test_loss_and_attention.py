"""The loss on a divided vocabulary and attention on divided sequences are those of one device, forward and backward."""

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
from titan_core.api.batch import IGNORE, Batch
from titan_core.api.loss import cross_entropy_sum
from titan_core.api.sequence_share import SequenceShare
from titan_parallel.context_parallel import HeadAndTail
from titan_parallel.gathered_attention import GatheredAttention
from titan_parallel.loss_parallel import VocabularyParallelLoss


@contextmanager
def mesh_of_all() -> Iterator[DeviceMesh]:
    """All processes in a row."""
    dist.init_process_group("gloo")
    try:
        yield init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    finally:
        dist.destroy_process_group()


def divided_losses(vocabularies: tuple[int, ...]) -> list[tuple[float, float, float, str]]:
    """Of each vocabulary: this rank's loss, that of one device, the largest error of a gradient, and its type."""
    told = []
    with mesh_of_all() as mesh:
        for vocabulary in vocabularies:
            generator = torch.Generator().manual_seed(vocabulary)
            logits = 20 * torch.randn(2, vocabulary + 1, vocabulary, generator=generator)
            targets = torch.arange(vocabulary).repeat(2, 1)  # every id once, and one that is ignored
            targets = torch.cat([targets, torch.full((2, 1), IGNORE)], dim=1)
            whole = logits.clone().requires_grad_()
            expected = cross_entropy_sum(whole, targets)
            (3.0 * expected).backward()
            width = -(-vocabulary // mesh.size())
            first = min(mesh.get_local_rank() * width, vocabulary)
            mine = logits[..., first : first + width].clone().requires_grad_()
            loss = VocabularyParallelLoss(mesh.get_group(), vocabulary)(mine, targets)
            (3.0 * loss).backward()
            assert whole.grad is not None and mine.grad is not None
            difference = (mine.grad - whole.grad[..., first : first + width]).abs()
            low = mine.detach().bfloat16().requires_grad_()
            VocabularyParallelLoss(mesh.get_group(), vocabulary)(low, targets).backward()
            assert low.grad is not None
            largest = difference.max().item() if difference.numel() else 0.0
            told.append((loss.item(), expected.item(), largest, str(low.grad.dtype)))
    return told


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_divided_vocabulary_has_the_loss_of_a_whole_one(gloo: GlooPool, ranks: int) -> None:
    """Even ones, odd ones, and one of which the last rank has nothing."""
    for told in gloo.run(ranks, divided_losses, (8, 9, 259, 5)):
        for loss, expected, difference, dtype in told:
            assert loss == pytest.approx(expected, rel=1e-6)
            assert difference < 1e-5
            assert dtype == "torch.bfloat16"


def share(whole: Tensor, rank: int, size: int, dim: int) -> Tensor:
    """A rank's chunks: from the front, and from the back."""
    chunks = whole.chunk(2 * size, dim=dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=dim)


def divided_attention(kv_heads: int, documents: Tensor | None) -> float:
    """The largest error of this rank's outputs and gradients."""
    with mesh_of_all() as mesh:
        rank, size = mesh.get_local_rank(), mesh.size()
        generator = torch.Generator().manual_seed(0)
        q, k, v, g = (torch.randn(2, heads, 16, 8, generator=generator) for heads in (4, kv_heads, kv_heads, 4))
        whole = [one.clone().requires_grad_() for one in (q, k, v)]
        seen = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
        expected = F.scaled_dot_product_attention(*whole, attn_mask=seen, enable_gqa=True)
        (expected * g).sum().backward()
        mine = [share(one, rank, size, 2).clone().requires_grad_() for one in (q, k, v)]
        chunks = tuple((one, 2 * size - 1 - one) for one in range(size))
        output = GatheredAttention(SequenceShare(mesh, chunks)).forward(*mine, documents)
        (output * share(g, rank, size, 2)).sum().backward()
        errors = [(output - share(expected, rank, size, 2)).abs().max()]
        for one, other in zip(mine, whole, strict=True):
            assert one.grad is not None and other.grad is not None
            errors.append((one.grad - share(other.grad, rank, size, 2)).abs().max())
        return float(torch.stack(errors).max())


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_divided_sequences_have_the_attention_of_whole_ones(gloo: GlooPool, kv_heads: int, packed: bool) -> None:
    documents = torch.tensor([[0] * 5 + [1] * 6 + [2] * 5, [0] * 3 + [1] * 13]) if packed else None
    for ranks in (2, 4):
        assert max(gloo.run(ranks, divided_attention, kv_heads, documents)) < 2e-6


def test_every_rank_has_a_chunk_from_the_front_and_one_from_the_back() -> None:
    whole = Batch(torch.arange(12)[None], torch.arange(12)[None] + 1, None, torch.arange(12)[None] // 5)
    shares = [HeadAndTail(rank, 3)(whole) for rank in range(3)]
    assert [one.tokens[0].tolist() for one in shares] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    for one in shares:
        assert one.positions is not None and torch.equal(one.positions, one.tokens)
        assert torch.equal(one.targets, one.tokens + 1)
        assert one.documents is whole.documents
    given: Any = HeadAndTail(1, 3)(Batch(whole.tokens, whole.targets, whole.tokens * 2))
    assert given.positions[0].tolist() == [4, 6, 16, 18]
