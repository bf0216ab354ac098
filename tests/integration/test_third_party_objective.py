"""Objectives of the examples: their losses are those of the papers, and what they lack is named. Their runs on meshes are in
``test_example_suites.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.third_party import TINY_LLAMA
from titan_core.api import Batch, Extra, UserError, Vocabulary
from titan_core.api.training.batch import IGNORE
from titan_testing.jobs import make_job, run_recipe

Use = Callable[[str], None]


@pytest.fixture
def use(site_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Use:
    """Return a function that makes an example importable."""
    return lambda example: monkeypatch.syspath_prepend(site_of(example))


def context_of(**section: float) -> Any:
    return SimpleNamespace(section=SimpleNamespace(**section))


def require_equal(loss: Tensor, expected: Tensor, logits: Tensor) -> None:
    """Assert that two losses of the logits, and their gradients, are equal."""
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits)[0] for one in (loss, expected)))


def test_the_z_loss_is_that_of_the_paper(use: Use) -> None:
    use("titan-objective-z-loss")
    from titan_objective_z_loss.objective import NextTokenWithZLoss  # type: ignore[import-not-found, unused-ignore]

    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1), requires_grad=True)
    targets = torch.tensor([[0, 6, IGNORE, 2, 3], [1, 1, 5, IGNORE, 4]])
    loss = NextTokenWithZLoss(context_of(coefficient=0.3))(logits, Batch(targets, targets), Vocabulary())
    penalty = 0.3 * logits.logsumexp(-1).square()[targets != IGNORE].sum()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") + penalty
    require_equal(loss, expected, logits)


def test_distillation_is_that_of_the_paper(use: Use) -> None:
    use("titan-distillation")
    from titan_distillation.objective import Distillation  # type: ignore[import-not-found, unused-ignore]

    generator = torch.Generator().manual_seed(0)
    student = torch.randn(2, 5, 7, generator=generator, requires_grad=True)
    teacher, targets = torch.randn(2, 5, 7, generator=generator), torch.randint(7, (2, 5), generator=generator)
    batch = Batch(targets, targets, extras={"teacher": Extra(teacher, True)})
    loss = Distillation(context_of(temperature=3.0, share=0.25))(student, batch, Vocabulary())
    hard = F.cross_entropy(student.flatten(0, 1), targets.flatten(), reduction="sum")
    log_p, log_q = (teacher / 3.0).log_softmax(-1), (student / 3.0).log_softmax(-1)
    soft = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    require_equal(loss, 0.25 * 9.0 * soft + 0.75 * hard, student)


def test_dpo_is_that_of_the_paper(use: Use) -> None:
    """Equation 7 for two pairs and for one, in sequences with padding."""
    use("titan-dpo")
    from titan_dpo.objective import DPO  # type: ignore[import-not-found, unused-ignore]

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, 7, generator=generator, requires_grad=True)
    reference = torch.randn(2, 9, generator=generator)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 3, 3], [0, 0, 0, 1, 1, 2, 2, 2, 2]])
    targets = torch.tensor([[1, 2, 3, 4, 5, 6, 0, 1, 2], [IGNORE, 4, 5, 6, 0, *[IGNORE] * 4]])
    side = torch.tensor([[1, 1, -1, -1, -1, 1, 1, -1, -1], [1, 1, 1, -1, -1, 0, 0, 0, 0]], dtype=torch.int8)
    weights = torch.tensor([[0.2] * 5 + [0.25] * 4, [0.25] * 9])
    extras = {"preference": Extra(side, True), "reference": Extra(reference, True)}
    batch = Batch(targets, targets, weights=weights, documents=documents, extras=extras)
    loss = DPO(context_of(beta=0.7))(logits, batch, Vocabulary())
    likelihood = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)

    def reward(row: int, positions: range) -> Tensor:
        return sum((0.7 * (likelihood - reference)[row, one] for one in positions), start=torch.zeros(()))

    expected = torch.zeros(())
    for row, chosen, rejected in ((0, range(2), range(2, 5)), (0, range(5, 7), range(7, 9)), (1, range(1, 3), range(3, 5))):
        expected = expected - F.logsigmoid(reward(row, chosen) - reward(row, rejected))
    require_equal(loss, expected, logits)


DPO_JOB: dict[str, object] = {**TINY_LLAMA, "objective.name": "dpo", "data.document_mask": "true", "job.device": "cpu"}
DISTILLED: dict[str, object] = {**TINY_LLAMA, "objective.name": "distillation", "job.device": "cpu"}
LACKING: dict[str, tuple[str, dict[str, object], str]] = {
    "no preferences": ("titan-dpo", DPO_JOB, "objective 'dpo' needs the extra tensor 'preference', which no dataset fills"),
    "no teacher": ("titan-distillation", DISTILLED, r"distillation\.teacher.*is required"),
    "no such teacher": ("titan-distillation", {**DISTILLED, "distillation.teacher": "nowhere"}, "nowhere"),
    "a teacher's short context": (
        "titan-distillation",
        {**DISTILLED, "distillation.teacher": "teacher", "training.seq_len": 3000, "model.args.max_seq_len": 4096},
        "the reference model of objective 'distillation': accepts at most 2,048 tokens",
    ),
}


@pytest.mark.parametrize("case", LACKING)
def test_what_an_objective_lacks_is_named(use: Use, in_tmp: Path, case: str) -> None:
    example, job, says = LACKING[case]
    if job.get("distillation.teacher") == "teacher":
        saved = {"training.steps": 1, "checkpoint.enable": "true", "job.dump_folder": "teacher", "job.device": "cpu"}
        run_recipe("llama3_debug", {**TINY_LLAMA, **saved})
    use(example)
    with pytest.raises(UserError, match=says):
        make_job("llama3_debug", job, 1)
