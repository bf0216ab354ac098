"""Steps that are CUDA graphs train as steps that the host launches, and a replay neither allocates nor waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.on_device import BF16, relative_error, train_on
from harness.taped_step import taped_graphs
from titan_core.api import StepInput
from titan_parallel.cuda_graphs import RecordedStep

pytestmark = pytest.mark.gpu

GRAPHS: dict[str, object] = {"training.disable_cuda_graphs": "false", "training.steps": 8}
PLAIN: dict[str, object] = {"training.steps": 8}
COMPILED: dict[str, object] = {"compile.enable": "true"}


@pytest.fixture(autouse=True)
def graphs(device: torch.device) -> Iterator[None]:
    """On the CPU the tests check only themselves, with a stand-in."""
    with ExitStack() as stack:
        if device.type == "cpu":
            stack.enter_context(taped_graphs())
        yield


JOBS: dict[str, dict[str, object]] = {
    "fp32": {},
    "bf16": BF16,
    "accumulation": {"training.local_batch_size": 1},
    "documents": {"data.document_mask": "true"},
    "dropout": {"model.args.dropout": 0.1},
    "chunks of the loss": {"objective.chunk_tokens": 32},
    "validation between steps": {
        "validation.enable": "true", "validation.dataset": "stdlib", "validation.freq": 2, "validation.steps": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_graphs_train_as_eager_code(device: torch.device, in_tmp: Path, job: str) -> None:
    """Not bit for bit: on a GPU, a division by a number is a product with its inverse, and one by a tensor is not."""
    found, plain = train_on(device, {**JOBS[job], **GRAPHS}), train_on(device, {**JOBS[job], **PLAIN})
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    assert found.grad_norms == pytest.approx(plain.grad_norms, rel=1e-3)
    for name, tensor in plain.final.items():
        assert relative_error(found.final[name], tensor) < 1e-3, name


@pytest.mark.parametrize(
    "overrides",
    [{}, BF16, {"activation_checkpoint.mode": "selective"}, {"activation_checkpoint.mode": "full"}],
    ids=["fp32", "bf16", "selective", "full"],
)
def test_graphs_train_as_compiled_code(cuda: torch.device, in_tmp: Path, overrides: dict[str, object]) -> None:
    compiled = {**COMPILED, **overrides}
    found, plain = train_on(cuda, {**compiled, **GRAPHS}), train_on(cuda, {**compiled, **PLAIN})
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    assert found.grad_norms == pytest.approx(plain.grad_norms, rel=1e-3)


@pytest.mark.parametrize("overrides", [{}, BF16, COMPILED], ids=["eager", "bf16", "compiled"])
def test_a_replay_neither_allocates_nor_waits(
    cuda: torch.device, in_tmp: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, object]
) -> None:
    run, allocations, addresses = RecordedStep.run, [], []

    def watched(step: RecordedStep, inputs: StepInput) -> Tensor:
        before = torch.cuda.memory_stats(cuda)["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = run(step, inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        allocations.append(torch.cuda.memory_stats(cuda)["allocation.all.allocated"] - before)
        addresses.append([None if gradient is None else id(gradient) for _, gradient in step._gradients])
        return loss

    monkeypatch.setattr(RecordedStep, "run", watched)
    train_on(cuda, {**overrides, **GRAPHS})
    assert allocations == [1] * 6  # the loss that it returns
    assert all(one == addresses[0] for one in addresses)
