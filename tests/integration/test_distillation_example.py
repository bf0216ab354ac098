"""Distillation from a frozen teacher as an example of a third party."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, make_job
from harness.third_party import EXAMPLES, TINY_LLAMA, install, train_with
from titan_core.api import Batch, Extra, UserError, Vocabulary

TEACHER: dict[str, object] = {
    **TINY_LLAMA,
    "model.args": "{dim = 64, n_layers = 4, n_heads = 4, n_kv_heads = 4, ffn_dim = 96}",
    "training.steps": 3,
    "training.seed": 7,
    "checkpoint.enable": "true",
    "job.dump_folder": "teacher",
}
STUDENT: dict[str, object] = {
    **TINY_LLAMA,
    "training.steps": 3,
    "training.global_batch_size": 4,
    "lr_scheduler.warmup_steps": 1,
    "objective.name": "distillation",
    "validation.enable": "true",
    "validation.dataset": "stdlib",
    "validation.freq": 3,
    "validation.steps": 1,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("distillation")
    install(folder, "titan-distillation")
    return str(folder)


@pytest.fixture(scope="module")
def teacher(gloo: GlooPool, site: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    gloo.run(1, train_with, site, str(folder), "llama3_debug", TEACHER)
    return str(folder / "teacher")


@pytest.fixture(scope="module")
def one(gloo: GlooPool, site: str, teacher: str, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    job = {**STUDENT, "distillation.teacher": teacher}
    ((record, _),) = gloo.run(1, train_with, site, str(tmp_path_factory.mktemp("one")), "llama3_debug", job)
    return record


def test_the_student_comes_closer_to_its_teacher(one: RunRecord) -> None:
    divergences = [step["divergence"] for step in one.metrics]
    assert divergences[0] > 1e-3 and divergences[2] < divergences[0]
    for loss, step in zip(one.losses, one.metrics, strict=True):
        assert loss == pytest.approx(0.5 * 4.0 * step["divergence"] + 0.5 * step["cross_entropy"], rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(2, {}, marks=pytest.mark.full),
        (2, {"parallelism.tensor_parallel_degree": 2, "objective.chunk_tokens": 30}),
        pytest.param(2, {"parallelism.pipeline_parallel_degree": 2, "objective.chunk_tokens": 30}, marks=pytest.mark.full),
        pytest.param(2, {"parallelism.context_parallel_degree": 2}, marks=pytest.mark.full),
        pytest.param(
            4, {"parallelism.pipeline_parallel_degree": 2, "parallelism.tensor_parallel_degree": 2}, marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_it_trains_as_on_one_device(
    gloo: GlooPool, site: str, teacher: str, one: RunRecord, tmp_path: Path, ranks: int, more: dict[str, object]
) -> None:
    job = {**STUDENT, "distillation.teacher": teacher, **more}
    for record, _ in gloo.run(ranks, train_with, site, str(tmp_path), "llama3_debug", job):
        assert record.losses == pytest.approx(one.losses, rel=2e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
        assert record.validation[3] == pytest.approx(one.validation[3], rel=2e-6)
        for found, expected in zip(record.metrics, one.metrics, strict=True):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def package(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)


@pytest.mark.usefixtures("package", "in_tmp")
def test_a_teacher_that_is_missing_or_too_short_is_refused(teacher: str) -> None:
    job = {**STUDENT, "job.device": "cpu"}
    with pytest.raises(UserError, match=r"distillation\.teacher.*is required"):
        make_job("llama3_debug", job, 1)
    with pytest.raises(UserError, match="nowhere"):
        make_job("llama3_debug", {**job, "distillation.teacher": "nowhere"}, 1)
    long = {**job, "distillation.teacher": teacher, "training.seq_len": 3000, "model.args.max_seq_len": 4096}
    with pytest.raises(UserError, match="the reference model of objective 'distillation': accepts at most 2,048 tokens"):
        make_job("llama3_debug", long, 1)


def test_the_loss_is_that_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "titan-distillation" / "src"))
    for name in [name for name in sys.modules if name.startswith("titan_distillation")]:
        monkeypatch.delitem(sys.modules, name)
    from titan_distillation.objective import Distillation  # type: ignore[import-not-found, unused-ignore]

    generator = torch.Generator().manual_seed(0)
    student = torch.randn(2, 5, 7, generator=generator, requires_grad=True)
    teacher, targets = torch.randn(2, 5, 7, generator=generator), torch.randint(7, (2, 5), generator=generator)
    context: Any = SimpleNamespace(section=SimpleNamespace(temperature=3.0, share=0.25))
    batch = Batch(targets, targets, extras={"teacher": Extra(teacher, True)})
    loss = Distillation(context)(student, batch, Vocabulary())
    hard = F.cross_entropy(student.flatten(0, 1), targets.flatten(), reduction="sum")
    log_p, log_q = (teacher / 3.0).log_softmax(-1), (student / 3.0).log_softmax(-1)
    soft = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    expected = 0.25 * 9.0 * soft + 0.75 * hard
    torch.testing.assert_close(loss, expected)
    (found,), (exact,) = torch.autograd.grad(loss, student), torch.autograd.grad(expected, student)
    torch.testing.assert_close(found, exact)
