"""The loss on a divided vocabulary is cross entropy, whatever the vocabulary divides by."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.gloo_pool import GlooPool
from titan_core.api.batch import IGNORE
from titan_parallel.loss_parallel import VocabularyParallelLoss

VOCABULARIES = (4, 5, 7, 8, 287)
SEQUENCES = (2, 6)


def logits_and_targets(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each id is a target at least once where there is room; some positions have none. Some logits are large."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 5.0 * torch.randn(*SEQUENCES, vocab_size, generator=generator)
    logits[0, 0, -1] = 300.0
    ids = torch.arange(SEQUENCES[0] * SEQUENCES[1])
    targets = (vocab_size - 1 - ids % vocab_size).view(SEQUENCES)
    targets[1, 2], targets[0, 3] = IGNORE, IGNORE
    return logits, targets


def divided(vocab_size: int, dtype: torch.dtype) -> tuple[float, torch.Tensor, int]:
    """Loss, this rank's columns of the gradient, and the number of the first of these."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    logits, targets = logits_and_targets(vocab_size)
    # Divided by DTensor, as the output layer divides them.
    mine = distribute_tensor(logits.to(dtype), mesh, [Shard(-1)]).to_local().clone().requires_grad_()
    loss = VocabularyParallelLoss(mesh.get_group(), vocab_size)(mine, targets)
    (0.25 * loss).backward()
    assert mine.grad is not None
    assert mine.grad.dtype == dtype
    columns = distribute_tensor(torch.arange(vocab_size), mesh, [Shard(0)]).to_local()
    return loss.item(), mine.grad, int(columns[0]) if len(columns) else vocab_size


def on_rank(dtype: torch.dtype) -> dict[int, tuple[float, torch.Tensor, int]]:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    try:
        return {size: divided(size, dtype) for size in VOCABULARIES}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_cross_entropy(gloo: GlooPool, ranks: int, dtype: torch.dtype) -> None:
    results = gloo.run(ranks, on_rank, dtype)
    for size in VOCABULARIES:
        logits, targets = logits_and_targets(size)
        whole = logits.to(dtype).requires_grad_()
        expected = F.cross_entropy(whole.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORE)
        (0.25 * expected).backward()
        assert whole.grad is not None
        for loss, gradient, first in (result[size] for result in results):
            assert loss == pytest.approx(expected.item(), rel=1e-6)
            torch.testing.assert_close(gradient, whole.grad[..., first : first + gradient.shape[-1]])
        assert sum(gradient.shape[-1] for _, gradient, _ in (result[size] for result in results)) == size
