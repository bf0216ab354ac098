"""Attention on divided sequences equals attention on one device, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.quick import rows
from titan_core.api import Batch, CausalAttention, SequenceShare, causal_attention
from titan_parallel.context_parallel import DividedAttention, HeadAndTail, head_and_tail
from titan_parallel.head_exchange import HeadExchange, attention_by_heads
from titan_parallel.region_collectives import Ranks
from titan_parallel.window_attention import halo_of
from titan_testing.gloo_pool import GlooPool


@contextmanager
def mesh_of_all(by_heads: int) -> Iterator[DeviceMesh]:
    """Yield a mesh of all processes: rings, and within them the ranks that trade heads for positions."""
    dist.init_process_group("gloo")
    try:
        size = int(os.environ["WORLD_SIZE"])
        yield init_device_mesh("cpu", (size // by_heads, by_heads), mesh_dim_names=("rings", "heads"))
    finally:
        dist.destroy_process_group()


def attention_on(mesh: DeviceMesh, passed: bool, options: dict[str, Any]) -> Callable[..., Tensor]:
    """Return the attention of a job whose sequences ``mesh`` divides."""
    rings, heads = mesh["rings"], mesh["heads"]
    share, mixer = SequenceShare(rings, head_and_tail(rings.size())), causal_attention(4, **options)
    whole = rings.size() == 1
    attend = CausalAttention(**options).forward if whole else DividedAttention(share, mixer, passed).forward
    return attend if heads.size() == 1 else attention_by_heads(HeadExchange(Ranks(heads)), attend)


def share(whole: Tensor, rank: int, size: int, dim: int) -> Tensor:
    """Return a rank's chunks: one from the front, and its mirror from the back."""
    chunks = whole.chunk(2 * size, dim=dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=dim)


@dataclass(frozen=True)
class Case:
    """Attention, and how it is divided."""

    by_heads: int = 1
    heads: int = 4
    kv_heads: int = 2
    passed: bool = False
    documents: bool = False
    seq: int = 16
    width: int = 8
    narrower: int = 0
    """By how much values are narrower than keys."""
    compiled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of :class:`CausalAttention`."""


def formula(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, documents: Tensor | None) -> Tensor:
    """Return attention in fp64, from all scores."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(case.heads // case.kv_heads, dim=1) for tensor in (k, v))
    scores = q @ k.transpose(2, 3) * case.options.get("scale", case.width**-0.5)
    if cap := case.options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    order = torch.arange(case.seq)
    distance = order[:, None] - order
    seen = (distance >= 0) & (distance < case.options.get("window", case.seq))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = scores.masked_fill(~seen, -torch.inf)
    if "sinks" in case.options:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def error_of(case: Case) -> float:
    """Return the largest error of this rank's outputs and gradients."""
    with mesh_of_all(case.by_heads) as mesh:
        rank, size = dist.get_rank(), mesh.size()
        generator = torch.Generator().manual_seed(0)
        shapes = ((case.heads, 0), (case.kv_heads, 0), (case.kv_heads, case.narrower), (case.heads, case.narrower))
        q, k, v, g = (torch.randn(2, count, case.seq, case.width - less, generator=generator) for count, less in shapes)
        cuts = torch.tensor([[5, 11], [3, case.seq - 2]])
        documents = (torch.arange(case.seq) >= cuts[:, :, None]).sum(1) if case.documents else None
        whole = [tensor.requires_grad_() for tensor in (q, k, v, torch.randn(case.heads, generator=generator))]
        expected = formula(case, *whole, documents)  # type: ignore[arg-type]
        (expected * g).sum().backward()
        mine = [share(tensor.detach(), rank, size, 2).clone().requires_grad_() for tensor in whole[:3]]
        sinks = whole[3].detach().clone().requires_grad_()
        attend = attention_on(mesh, case.passed, dict(case.options))
        more = {"sinks": sinks} if "sinks" in case.options else {}
        output = attend(*mine, documents=documents, **more)
        assert torch.equal(output, attend(*mine, documents, **more))
        if case.compiled:
            output = torch.compile(attend, backend="aot_eager", fullgraph=True)(*mine, documents, **more)
        (output * share(g, rank, size, 2)).sum().backward()
        errors = [(output - share(expected, rank, size, 2)).abs().max()]
        for local, full in zip(mine, whole[:3], strict=True):
            assert local.grad is not None and full.grad is not None
            errors.append((local.grad - share(full.grad, rank, size, 2)).abs().max())
        if more:
            assert sinks.grad is not None and whole[3].grad is not None
            dist.all_reduce(sinks.grad)
            errors.append((sinks.grad - whole[3].grad).abs().max())
        return float(torch.stack([error.float() for error in errors]).max())


METHODS: dict[str, dict[str, Any]] = {"allgather": {}, "alltoall": {"passed": True}, "documents": {"documents": True}}


@pytest.mark.parametrize("kv_heads", [pytest.param(4, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("method", METHODS)
def test_divided_sequences_attend_as_whole_ones(gloo: GlooPool, kv_heads: int, method: str) -> None:
    for ranks in (2, 4):
        assert max(gloo.run(ranks, error_of, Case(kv_heads=kv_heads, **METHODS[method]))) < 2e-6


BY_HEADS = {
    f"{ranks} ranks, {by_heads} by heads, {heads}/{kv_heads} heads, {method}": (
        ranks,
        Case(by_heads, heads, kv_heads, **METHODS[method]),
    )
    for ranks, by_heads in ((2, 2), (4, 4), (4, 2), (8, 4), (8, 2))
    for heads, kv_heads in ((4, 4), (4, 2), (4, 1), (12, 3))
    for method in METHODS
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
    ranks, divided = BY_HEADS[case]
    assert max(gloo.run(ranks, error_of, divided)) < 4e-6


OPTIONS: dict[str, dict[str, Any]] = {
    "window of 1": {"window": 1},
    "window of 2": {"window": 2},
    "window of 5": {"window": 5},  # more than a chunk, with 4 ranks
    "window of 13": {"window": 13},
    "window of all": {"window": 16},
    "cap": {"softcap": 1.5},
    "scale": {"scale": 0.9},
    "sinks": {"sinks": True},
    "all": {"window": 7, "softcap": 1.5, "scale": 0.9, "sinks": True},
}
DIVIDED = {"2 in a ring": (2, 1), "4 in a ring": (4, 1), "4 by heads": (4, 4), "2 x 2 by both": (4, 2)}
WITH_OPTIONS = {
    f"{option}, {division}, {method}": (ranks, Case(by_heads, narrower=2, options=OPTIONS[option], **METHODS[method]))
    for option in OPTIONS
    for division, (ranks, by_heads) in DIVIDED.items()
    for method in METHODS
}


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    "case",
    rows(
        WITH_OPTIONS,
        (
            "window of 5, 4 in a ring, allgather",
            "window of 13, 4 in a ring, documents",
            "sinks, 4 in a ring, allgather",
            "sinks, 2 in a ring, alltoall",
            "all, 4 by heads, documents",
            "all, 2 x 2 by both, allgather",
        ),
    ),
)
def test_options_of_attention_hold_across_ranks(gloo: GlooPool, case: str) -> None:
    ranks, divided = WITH_OPTIONS[case]
    assert max(gloo.run(ranks, error_of, divided)) < 4e-6


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 70))
def test_ranks_send_exactly_the_positions_that_windows_cover(ranks: int, length: int, window: int) -> None:
    chunks = head_and_tail(ranks)
    own = [torch.cat([torch.arange(length) + chunk * length for chunk in chunks[rank]]).tolist() for rank in range(ranks)]
    halos = [halo_of(chunks, rank, length, window) for rank in range(ranks)]
    for rank, halo in enumerate(halos):
        arrived: list[int] = []
        for other, count in enumerate(halo.received):
            sent = [own[other][place] for span in halos[other].sent[rank] for place in range(*span)]
            assert len(sent) == count
            arrived += sent
        seen = {key for query in own[rank] for key in range(max(0, query - window + 1), query + 1)}
        assert sorted(arrived) == sorted(seen - set(own[rank]))
        for chunk, pieces, first in zip(chunks[rank], halo.keys, halo.first, strict=True):
            keys = [(own[rank] if is_own else arrived)[place] for is_own, span in pieces for place in range(*span)]
            assert first == keys[0] and keys == list(range(max(0, chunk * length - window + 1), (chunk + 1) * length))


@pytest.mark.full
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_eight_ranks_attend_as_one(gloo: GlooPool, method: str) -> None:
    assert max(gloo.run(8, error_of, Case(**METHODS[method]))) < 2e-6


@pytest.mark.parametrize("method", ["allgather", pytest.param("documents", marks=pytest.mark.full)])
@pytest.mark.parametrize("by_heads", [1, 2])
@pytest.mark.parametrize("options", [{}, {"window": 5}, pytest.param({"sinks": True}, marks=pytest.mark.full)], ids=str)
def test_the_compiler_takes_all_of_it(gloo: GlooPool, method: str, by_heads: int, options: dict[str, Any]) -> None:
    case = Case(by_heads, compiled=True, options=options, **METHODS[method])
    assert max(gloo.run(2, error_of, case)) < 4e-6


def test_heads_of_any_width_are_divided(gloo: GlooPool) -> None:
    assert max(gloo.run(2, error_of, Case(width=6))) < 2e-6


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
