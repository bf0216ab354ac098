"""A run on a GPU computes what plain torch computes, in fp32 and in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.bare_loop import BareLoop
from harness import oracle
from harness.on_device import BF16, SMALL, relative_error, train_on
from titan_core.api import hookimpl
from titan_testing.jobs import RunRecord, make_job

pytestmark = pytest.mark.gpu

HEADS, SHARDS, SEQUENCES, SEQ_LEN, STEPS, LR, EPS = 4, 2, 4, 16, 6, 4e-3, 1e-3
FACTORS = (1 / 3, 2 / 3, 1.0, 1.0, 2 / 3, 1 / 3)
"""Learning rate of each step as a share of the peak: three steps of warmup, and a decay over the last three."""
PLAIN: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 48, vocab_size = 272}",
    "training.dataset": "json",
    "training.dataset_path": "documents.jsonl",
    "training.steps": STEPS,
    "training.seq_len": SEQ_LEN,
    "training.global_batch_size": SEQUENCES,
    "training.local_batch_size": SEQUENCES,
    "data.logical_shards": SHARDS,
    "data.document_mask": "true",
    "optimizer.lr": LR,
    "optimizer.eps": EPS,
    "optimizer.weight_decay": 0.5,
    "lr_scheduler.warmup_steps": 3,
    "lr_scheduler.decay_ratio": 0.5,
    "lr_scheduler.decay_type": "linear",
    "lr_scheduler.min_lr_factor": 0.0,
}


@pytest.mark.parametrize("local_batch", [4, 1])
@pytest.mark.parametrize("document_mask", ["false", "true"])
def test_an_fp32_run_is_that_of_plain_torch(
    device: torch.device, in_tmp: Path, local_batch: int, document_mask: str
) -> None:
    """The oracle computes in fp64 on the CPU, so the tolerances are those of fp32 arithmetic: a few units in the last place
    (6e-8 each) for a mean over thousands of terms, and more for gradients, which are differences of such sums. TF32 (5e-4)
    would fail. FlexAttention (document masks) multiplies in fp32, but sums in another order."""
    oracle.write_documents(in_tmp / "documents.jsonl")
    masked = document_mask == "true"
    settings = {**PLAIN, "training.local_batch_size": local_batch, "data.document_mask": document_mask}
    record = train_on(device, settings, recipe="llama3_debug")
    steps = oracle.read(STEPS, seq_len=SEQ_LEN, sequences=SEQUENCES, shards=SHARDS, document_mask=masked)
    expected = oracle.train(
        record.initial, steps, (oracle.Group(("norm",), LR, 0.0), oracle.Group((), LR, 0.5)), heads=HEADS, factors=FACTORS,
        optimizer=torch.optim.AdamW, betas=(0.9, 0.95), eps=EPS, max_norm=1.0,
    )  # fmt: skip
    assert record.targets == expected.targets
    assert record.losses == pytest.approx(expected.losses, rel=3e-6)
    assert record.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    for name, tensor in expected.gradients.items():
        assert relative_error(record.gradients[name], tensor) < 1e-5, f"gradient {name}"
    for name, tensor in expected.final.items():
        assert relative_error(record.final[name], tensor) < 1e-5, name


def test_losses_are_those_of_the_cpu(device: torch.device, in_tmp: Path) -> None:
    """Initial weights differ in the last bits (``torch.erfinv`` on a GPU), and sums in their order."""
    here, cpu = train_on(device), train_on(torch.device("cpu"))
    assert here.losses == pytest.approx(cpu.losses, rel=1e-5)
    assert here.grad_norms == pytest.approx(cpu.grad_norms, rel=1e-4)


class Batches:
    """Keeps the batches of a run, as its step receives them."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    @hookimpl
    def titan_before_update(self, update: Any) -> None:
        self.kept.append(update.microbatches[0])


def bare_run(
    device: torch.device, overrides: dict[str, object], record: RunRecord, batches: list[Any]
) -> list[tuple[Tensor, Tensor]]:
    """Train from the weights of ``record`` on the same batches by :class:`BareLoop`; return losses and norms."""
    job = make_job("tiny", {**SMALL, **overrides})
    model: Any = job.model.build()
    model.load_state_dict(record.initial, strict=False)
    for name, compute in job.model.layout.buffers.items():
        model.get_buffer(name).copy_(compute())
    dtype = getattr(torch, str(job.config.value("training.mixed_precision_param")))
    loop = BareLoop(model.to(device), dtype=dtype)
    pairs = zip(batches, record.learning_rates, strict=True)
    return [loop.step(batch.tokens, batch.targets, lr) for batch, lr in pairs]


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    # In bf16 (8 bits of mantissa), the order of operations moves a loss by up to a unit in the last place, 4e-3.
    [({}, 1e-5), (BF16, 4e-3)],
    ids=["fp32", "bf16"],
)
def test_a_bare_loop_on_the_same_device_learns_the_same(
    device: torch.device, in_tmp: Path, overrides: dict[str, object], tolerance: float
) -> None:
    """This is also the loop of ``benchmarks/gpu``, so it compares equal work."""
    batches = Batches()
    record = train_on(device, overrides, observers=(batches,))
    found = bare_run(device, overrides, record, batches.kept)
    assert record.losses == pytest.approx([loss.item() for loss, _ in found], rel=tolerance)
    assert record.grad_norms == pytest.approx([norm.item() for _, norm in found], rel=10 * tolerance)
    assert record.losses[-1] < record.losses[0]


@pytest.fixture
def rank_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchrun's environment for a single rank, so that the run meets through a store, as many ranks do."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield
    del store


def test_a_rank_with_a_rendezvous_trains_as_one_without(device: torch.device, in_tmp: Path, rank_of_one: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK")
        alone = train_on(device)
    assert train_on(device).losses == pytest.approx(alone.losses, rel=1e-6)
