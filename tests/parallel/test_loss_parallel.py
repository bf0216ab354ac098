"""The loss on a divided vocabulary is the loss on the whole one, however unevenly it is divided."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from harness.gloo_pool import GlooPool
from titan_core.data.batch import IGNORE
from titan_parallel.loss_parallel import VocabularyParallelLoss


def logits_and_targets(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Each id of the vocabulary is a target, and some positions have none."""
    logits = torch.randn(2, vocab_size + 2, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    row = [*range(vocab_size), IGNORE, 0]
    return logits, torch.tensor([row, row[::-1]])


def losses(sizes: list[int]) -> list[tuple[float, Tensor]]:
    """Of each vocabulary, the loss and this rank's part of the gradient of the logits."""
    dist.init_process_group("gloo")
    try:
        found = []
        for size in sizes:
            logits, targets = logits_and_targets(size)
            parts = logits.tensor_split([-(-size // dist.get_world_size()) * n for n in range(1, dist.get_world_size())], -1)
            mine = parts[dist.get_rank()].clone().requires_grad_()
            group = dist.group.WORLD
            assert group is not None
            loss = VocabularyParallelLoss(group, size)(mine, targets)
            loss.backward()
            assert mine.grad is not None
            found.append((loss.item(), mine.grad))
        return found
    finally:
        dist.destroy_process_group()


SIZES = [6, 7, 10, 11, 13, 257]


@pytest.mark.parametrize("ranks", [2, 3])
def test_loss_and_gradient_are_those_of_the_whole_vocabulary(gloo: GlooPool, ranks: int) -> None:
    of_ranks = gloo.run(ranks, losses, SIZES)
    for number, size in enumerate(SIZES):
        logits, targets = logits_and_targets(size)
        logits.requires_grad_()
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        expected.backward()
        assert logits.grad is not None
        for found in of_ranks:
            assert found[number][0] == pytest.approx(expected.item(), rel=1e-5)
        gradient = torch.cat([found[number][1] for found in of_ranks], dim=-1)
        torch.testing.assert_close(gradient, logits.grad, rtol=1e-4, atol=1e-5)
