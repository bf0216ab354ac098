"""Arithmetic over a sharded vocabulary equals that over the whole one, forward and backward, even for uneven shards."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_core.api import Batch, Vocabulary
from titan_core.api.training import vocabulary
from titan_core.api.training.batch import IGNORE
from titan_core.model.next_token import NextToken
from titan_testing.gloo_pool import GlooPool

VOCABULARIES = (4, 5, 7, 8, 287)
SEQUENCES = (2, 6)


def batch_of(vocab_size: int) -> tuple[Tensor, Batch]:
    """Return logits and a batch. Each id is a target at least once if there is room; some positions have no target, some
    weigh more, and some logits are large."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 5.0 * torch.randn(*SEQUENCES, vocab_size, generator=generator)
    logits[0, 0, -1] = 300.0
    ids = torch.arange(SEQUENCES[0] * SEQUENCES[1])
    targets = (vocab_size - 1 - ids % vocab_size).view(SEQUENCES)
    targets[1, 2], targets[0, 3] = IGNORE, IGNORE
    return logits, Batch(targets, targets, weights=1.0 + ids.view(SEQUENCES) % 3)


def next_token(logits: Tensor, batch: Batch, columns: Vocabulary) -> Tensor:
    return NextToken()(logits, batch, columns)


def with_normaliser(logits: Tensor, batch: Batch, columns: Vocabulary) -> Tensor:
    likelihood, normaliser = columns.log_likelihood(logits, batch.tokens)
    return (2.0 * normaliser.square() - likelihood)[batch.targets != IGNORE].sum()


def squares(logits: Tensor, batch: Batch, columns: Vocabulary) -> Tensor:
    return columns.sum(logits.float().square()).sqrt().sum()


Formula = Callable[[Tensor, Batch, Vocabulary], Tensor]
FORMULAS: tuple[Formula, ...] = (next_token, with_normaliser, squares)


def whole(formula: Formula, logits: Tensor, batch: Batch) -> Tensor:
    """Compute the loss with torch only."""
    scores, trained = logits.float(), batch.targets != IGNORE
    if formula is squares:
        return scores.square().sum(-1).sqrt().sum()
    losses = F.cross_entropy(scores.flatten(0, 1), batch.targets.flatten(), reduction="none", ignore_index=IGNORE)
    if formula is next_token:
        assert batch.weights is not None
        return (losses * batch.weights.flatten()).sum()
    return losses.sum() + (2.0 * scores.logsumexp(-1).square())[trained].sum()


def divided(formula: Formula, vocab_size: int, dtype: torch.dtype) -> tuple[float, Tensor, int]:
    """Return the loss, this rank's columns of the gradient, and the first column's index."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    logits, batch = batch_of(vocab_size)
    # Sharded by DTensor, like the output layer.
    mine = distribute_tensor(logits.to(dtype), mesh, [Shard(-1)]).to_local().clone().requires_grad_()
    columns = distribute_tensor(torch.arange(vocab_size), mesh, [Shard(0)]).to_local()
    first = int(columns[0]) if len(columns) else vocab_size
    loss = formula(mine, batch, Vocabulary(mesh.get_group(), first))
    (0.25 * loss).backward()
    assert mine.grad is not None
    assert mine.grad.dtype == dtype
    return loss.item(), mine.grad, first


Results = dict[tuple[int, int], tuple[float, Tensor, int]]


def on_rank(dtype: torch.dtype) -> Results:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    try:
        return {(n, size): divided(one, size, dtype) for n, one in enumerate(FORMULAS) for size in VOCABULARIES}
    finally:
        dist.destroy_process_group()


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sharded_results_equal_unsharded_ones(gloo: GlooPool, ranks: int, dtype: torch.dtype) -> None:
    results = gloo.run(ranks, on_rank, dtype)
    for number, formula in enumerate(FORMULAS):
        for size in VOCABULARIES:
            logits, batch = batch_of(size)
            exact = logits.to(dtype).requires_grad_()
            expected = whole(formula, exact, batch)
            (0.25 * expected).backward()
            assert exact.grad is not None
            for loss, gradient, first in (result[number, size] for result in results):
                assert loss == pytest.approx(expected.item(), rel=1e-6)
                torch.testing.assert_close(gradient, exact.grad[..., first : first + gradient.shape[-1]])
            assert sum(result[number, size][1].shape[-1] for result in results) == size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tensor_of_logits_is_computed_in_pieces(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    logits, batch = batch_of(287)
    exact = logits.to(dtype).requires_grad_()
    with_normaliser(exact, batch, Vocabulary()).backward()
    monkeypatch.setattr(vocabulary, "LARGEST_PIECE", 4 * 287 * 5)  # five of twelve positions
    found = logits.to(dtype).requires_grad_()
    with_normaliser(found, batch, Vocabulary()).backward()
    torch.testing.assert_close(found.grad, exact.grad, rtol=0, atol=0)


def test_beside_bf16_logits_and_their_gradient_there_is_one_piece_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and in backward."""
    from harness.storages import LargestLive

    logits = torch.randn(1, 64, 4096).bfloat16().requires_grad_()
    targets = torch.randint(0, 4096, (1, 64))
    size, piece = logits.numel() * 2, 4 * 4096 * 8
    monkeypatch.setattr(vocabulary, "LARGEST_PIECE", piece)
    with LargestLive() as live:
        NextToken()(logits, Batch(targets, targets), Vocabulary()).backward()
    assert size + piece <= live.largest < 1.1 * (size + piece)


def test_compiled_arithmetic_is_the_same() -> None:
    logits, batch = batch_of(287)
    exact, found = (logits.bfloat16().requires_grad_() for _ in range(2))
    expected = with_normaliser(exact, batch, Vocabulary())
    loss = torch.compile(with_normaliser, backend="aot_eager", fullgraph=True)(found, batch, Vocabulary())
    (loss + expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found.grad, exact.grad)
