"""Device memory: what the loss and recomputation save, and the figures that a run logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.objectives import first_step
from harness.on_device import BF16, SMALL, relative_error, train_on
from titan_core.api import Batch, ModelPart
from titan_core.loop.world import join_world
from titan_core.model.build import build_parts
from titan_core.toolkit.device import memory
from titan_core.toolkit.json_lines import read_lines
from titan_testing.jobs import make_job, whole

pytestmark = pytest.mark.gpu

MIB = 2**20
VOCABULARY, TOKENS = 32768, 2048
"""A vocabulary whose logits (256 MiB in fp32) dwarf everything else."""


def wide(vocabulary: int) -> dict[str, object]:
    """Return the settings of a model of one block."""
    return {
        **SMALL,
        "model.args": f"{{dim = 64, n_layers = 1, n_heads = 4, n_kv_heads = 2, ffn_dim = 128, vocab_size = {vocabulary}}}",
        "training.seq_len": TOKENS // 4,
        "training.local_batch_size": 4,
    }


def tokens_on(device: torch.device, high: int, shape: tuple[int, int]) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0)).to(device)


def peak_of(device: torch.device, compute: Callable[[], object]) -> float:
    """Return the memory, in MiB, that ``compute`` needs at most beyond what is allocated before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    compute()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def chunked_loss(device: torch.device, vocabulary: int, chunk: int) -> tuple[ModelPart, Callable[[], Tensor]]:
    """Return a model and a function that computes its loss, in chunks of ``chunk`` tokens, and its gradients."""
    job = make_job("tiny", {**wide(vocabulary), "objective.chunk_tokens": chunk, "job.device": device.type})
    with join_world(job) as world:
        (part,) = build_parts(job, world.mesh, world.device)
    tokens = tokens_on(device, vocabulary, (4, TOKENS // 4))

    def compute() -> Tensor:
        loss = part.forward_loss(first_step(Batch(tokens, tokens.roll(-1, 1))))
        loss.backward()
        return loss.detach()

    return part, compute


def whole_loss(device: torch.device, vocabulary: int) -> tuple[Any, Callable[[], Tensor]]:
    """Return the same for the same model, with torch's cross entropy on all logits."""
    job = make_job("tiny", {**wide(vocabulary), "job.device": device.type})
    model: Any = job.model.build()
    with join_world(job) as world:
        (part,) = build_parts(job, world.mesh, world.device)
    model.load_state_dict({name: whole(weight) for name, weight in part.module.named_parameters()}, strict=False)
    for name, compute in job.model.layout.buffers.items():
        model.get_buffer(name).copy_(compute())
    model = model.to(device)
    tokens = tokens_on(device, vocabulary, (4, TOKENS // 4))

    def compute_loss() -> Tensor:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum")
        loss.backward()
        return loss.detach()

    return model, compute_loss


def test_a_chunked_loss_is_cross_entropy(device: torch.device, in_tmp: Path) -> None:
    part, chunked = chunked_loss(device, 1024, 256)
    model, plain = whole_loss(device, 1024)
    assert chunked().item() == pytest.approx(plain().item(), rel=1e-6)
    exact = dict(model.named_parameters())
    for name, weight in part.module.named_parameters():
        assert weight.grad is not None
        assert relative_error(whole(weight.grad), exact[name].grad) < 1e-5, name


def test_a_chunked_loss_never_holds_all_logits(cuda: torch.device, in_tmp: Path) -> None:
    """Plain torch holds logits, their log softmax and a gradient. In chunks of an eighth, none of them exists as a whole;
    the gradients of the two weights of the vocabulary's size (8 MiB each) and the rest of the model remain."""
    logits = TOKENS * VOCABULARY * 4 / MIB
    _, in_one = whole_loss(cuda, VOCABULARY)
    plain = peak_of(cuda, in_one)
    _, chunked = chunked_loss(cuda, VOCABULARY, TOKENS // 8)
    ours = peak_of(cuda, chunked)
    assert plain > 2 * logits
    assert ours < 0.75 * logits, f"{ours:.0f} MiB; all logits in fp32 are {logits:.0f} MiB, plain torch needs {plain:.0f}"


def saved(device: torch.device, overrides: dict[str, object]) -> float:
    """Return the memory, in MiB, that stays allocated between forward and backward."""
    deep = {"model.args": "{dim = 256, n_layers = 8, n_heads = 4, n_kv_heads = 2, ffn_dim = 1024}"}
    shape = {"training.seq_len": 512, "training.local_batch_size": 4}
    job = make_job("tiny", {**SMALL, **deep, **shape, **overrides, "job.device": device.type})
    with join_world(job) as world:
        (part,) = build_parts(job, world.mesh, world.device)
        tokens = tokens_on(device, 256, (4, 512))
        batch = first_step(Batch(tokens, tokens))
        part.forward_loss(batch).backward()  # makes gradients and workspaces
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        loss = part.forward_loss(batch)
        torch.cuda.synchronize(device)
        kept = torch.cuda.memory_allocated(device) - before
        loss.backward()
        return kept / MIB


def test_recomputation_saves_memory(cuda: torch.device, in_tmp: Path) -> None:
    none, selective, full = (
        saved(cuda, {**BF16, "activation_checkpoint.mode": mode}) for mode in ("none", "selective", "full")
    )
    assert full < selective < none
    assert full < 0.3 * none


def test_a_run_logs_the_allocators_figures(cuda: torch.device, in_tmp: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(cuda)
    train_on(cuda)
    last = read_lines(Path("outputs/tiny/metrics.jsonl"))[-1]
    assert 0 < last["memory_active_gib"] <= last["memory_peak_gib"] <= last["memory_reserved_gib"]
    assert last["memory_peak_gib"] == pytest.approx(torch.cuda.max_memory_allocated(cuda) / 2**30, rel=0.5)
    assert last["memory_retries"] == memory(cuda).retries
