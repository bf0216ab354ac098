"""Direct preference optimization as an example of a third party: two answers a sequence, and a frozen reference policy."""

from __future__ import annotations

import io
import json
import math
import sys
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, make_job
from harness.third_party import EXAMPLES, TINY_LLAMA, install, train_with
from titan_core.api import Batch, Extra, UserError, Vocabulary
from titan_core.api.training.batch import IGNORE
from titan_core.cli.main import main

DPO: dict[str, object] = {
    **TINY_LLAMA,
    "training.seq_len": 64,
    "training.steps": 3,
    "training.dataset": "preferences",
    "training.dataset_path": "pairs.jsonl",
    "data.document_mask": "true",
    "objective.name": "dpo",
    "dpo.beta": 0.2,
    "lr_scheduler.warmup_steps": 1,
    "optimizer.lr": 1e-3,
    "validation.enable": "true",
    "validation.dataset": "preferences",
    "validation.dataset_path": "pairs.jsonl",
    "validation.freq": 3,
}
PAIRS = [
    {"prompt": f"{n} + {n}?", "chosen": f" {2 * n}", "rejected": " no idea" if n % 3 else " I would rather not say it"}
    for n in range(24)
]


def write_pairs(folder: Path) -> None:
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in PAIRS))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dpo")
    install(folder, "titan-dpo")
    return str(folder)


@pytest.fixture(scope="module")
def one(gloo: GlooPool, site: str, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    folder = tmp_path_factory.mktemp("one")
    write_pairs(folder)
    ((record, _),) = gloo.run(1, train_with, site, str(folder), "llama3_debug", DPO)
    return record


def test_the_policy_begins_at_the_reference_and_learns_to_prefer(one: RunRecord) -> None:
    assert one.losses[0] == pytest.approx(math.log(2.0), rel=1e-6)
    assert one.metrics[0] == {"margin": 0.0, "accuracy": 0.0}
    assert 0.3 < one.losses[2] < 0.9 * one.losses[0]
    assert 0.05 < one.metrics[2]["margin"] < 2.0 and one.metrics[2]["accuracy"] > 0.7
    assert one.validation_metrics[3]["accuracy"] > 0.7


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(2, {}, marks=pytest.mark.full),
        pytest.param(2, {"parallelism.tensor_parallel_degree": 2}, marks=pytest.mark.full),
        (2, {"parallelism.pipeline_parallel_degree": 2}),
        (2, {"parallelism.context_parallel_degree": 2}),
        pytest.param(
            4, {"parallelism.context_parallel_degree": 2, "parallelism.tensor_parallel_degree": 2}, marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_it_trains_as_on_one_device(
    gloo: GlooPool, site: str, one: RunRecord, tmp_path: Path, ranks: int, more: dict[str, object]
) -> None:
    write_pairs(tmp_path)
    for record, _ in gloo.run(ranks, train_with, site, str(tmp_path), "llama3_debug", {**DPO, **more}):
        assert record.losses == pytest.approx(one.losses, rel=2e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
        assert record.validation[3] == pytest.approx(one.validation[3], rel=2e-6)
        for found, expected in zip(record.metrics, one.metrics, strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert record.validation_metrics[3] == pytest.approx(one.validation_metrics[3], rel=1e-5, abs=1e-6)


@pytest.mark.full
def test_a_resumed_run_has_the_same_reference(gloo: GlooPool, site: str, one: RunRecord, tmp_path: Path) -> None:
    """The reference is the model that the run started from, and not the one that it resumed."""
    write_pairs(tmp_path)
    saved = {**DPO, "checkpoint.enable": "true", "checkpoint.interval": 2}
    gloo.run(1, train_with, site, str(tmp_path), "llama3_debug", {**saved, "training.stop_at_step": 2})
    ((resumed, _),) = gloo.run(1, train_with, site, str(tmp_path), "llama3_debug", saved)
    assert resumed.losses == one.losses[2:] and resumed.metrics == one.metrics[2:]


def errors_of_losses(site: str, folder: str) -> tuple[int, list[str]]:
    """Train, and ask for the losses of documents. Return the exit status and the errors."""
    saved = {"checkpoint.enable": "true", "checkpoint.interval": 2, "validation.enable": "false"}
    train_with(site, folder, "llama3_debug", {**DPO, **saved, "job.dump_folder": "run"})
    lines = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stderr(lines):
        patched.syspath_prepend(site)
        status = main(["data", "step", "run", "3", "--loss"])
    return status, [line for line in lines.getvalue().splitlines() if line.startswith("titan: error: ")]


@pytest.mark.full
def test_its_documents_have_no_losses(gloo: GlooPool, site: str, tmp_path: Path) -> None:
    write_pairs(tmp_path)
    ((status, errors),) = gloo.run(1, errors_of_losses, site, str(tmp_path))
    assert status == 2 and len(errors) == 1
    assert 'objective.name = "dpo": compares with a reference model' in errors[0] and errors[0].endswith("; drop --loss")


@pytest.fixture
def package(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)


@pytest.mark.usefixtures("package", "in_tmp")
def test_a_dataset_without_preferences_is_refused() -> None:
    job = {
        **DPO,
        "training.dataset": "stdlib",
        "training.dataset_path": "",
        "job.device": "cpu",
        "validation.enable": "false",
    }
    with pytest.raises(UserError, match="objective 'dpo' needs the extra tensor 'preference', which no dataset fills"):
        make_job("llama3_debug", job, 1)


def test_the_loss_is_that_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equation 7 for two pairs and for one, in sequences with padding."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "titan-dpo" / "src"))
    for name in [name for name in sys.modules if name.startswith("titan_dpo")]:
        monkeypatch.delitem(sys.modules, name)
    from titan_dpo.objective import DPO as Function  # type: ignore[import-not-found, unused-ignore]

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, 7, generator=generator, requires_grad=True)
    reference = torch.randn(2, 9, generator=generator)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 3, 3], [0, 0, 0, 1, 1, 2, 2, 2, 2]])
    targets = torch.tensor([[1, 2, 3, 4, 5, 6, 0, 1, 2], [IGNORE, 4, 5, 6, 0, *[IGNORE] * 4]])
    side = torch.tensor([[1, 1, -1, -1, -1, 1, 1, -1, -1], [1, 1, 1, -1, -1, 0, 0, 0, 0]], dtype=torch.int8)
    weights = torch.tensor([[0.2] * 5 + [0.25] * 4, [0.25] * 9])
    extras = {"preference": Extra(side, True), "reference": Extra(reference, True)}
    batch = Batch(targets, targets, weights=weights, documents=documents, extras=extras)
    context: Any = SimpleNamespace(section=SimpleNamespace(beta=0.7))
    loss = Function(context)(logits, batch, Vocabulary())
    likelihood = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)

    def reward(row: int, positions: range) -> Tensor:
        return sum((0.7 * (likelihood - reference)[row, one] for one in positions), start=torch.zeros(()))

    expected = torch.zeros(())
    for row, chosen, rejected in ((0, range(2), range(2, 5)), (0, range(5, 7), range(7, 9)), (1, range(1, 3), range(3, 5))):
        expected = expected - F.logsigmoid(reward(row, chosen) - reward(row, rejected))
    torch.testing.assert_close(loss, expected)
    (found,), (exact,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, exact)
