"""Copies for asynchronous checkpoints, on fake CUDA tensors."""

from __future__ import annotations

import pytest
import torch

from harness.fake_cuda import FakeCuda
from titan_ckpt.save.staging import Staging


def request_copies(pinned: bool) -> tuple[tuple[int, ...], str]:
    """Do what saving does in the training thread and in the background, but for the wait of the background thread."""
    staging = Staging(torch.device("cuda", 0), pinned)
    tensors = {"weight": torch.ones(4, 2, device="cuda").t()}
    for _ in range(2):  # the second time into memory that is there already
        copies, copied = staging.copy(tensors, torch.cuda.current_stream().record_event())
        staging.make_stream_wait(copied)
    return tuple(copies["weight"].shape), copies["weight"].device.type


def save(pinned: bool) -> None:
    snapshot = Staging(torch.device("cuda", 0), pinned).snapshot({"weight": torch.ones(4, device="cuda")})
    snapshot.copy()


def test_no_host_waits_for_copies_to_pinned_memory(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(request_copies, True, strict=True) == ((2, 4), "cpu")


def test_only_the_thread_that_writes_waits(fake_cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match=r"Event\.synchronize, at titan_ckpt/save/staging\.py"):
        fake_cuda.run(save, True, strict=True)
    fake_cuda.run(save, True, strict=False)
