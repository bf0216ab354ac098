"""Samples of the live model on every kind of mesh: those of one device, or one line that says why there are none.

That sampling changes nothing of training is tested with all other observers, in test_inherited_suites.py.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from titan_core.api import hookimpl
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe
from titan_testing.meshes import CP, DR, PP, TP

SETTINGS: dict[str, object] = {
    "model.args": "{dim = 48, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 96}",
    "training.seq_len": 48,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 3,
    "lr_scheduler.warmup_steps": 1,
    "job.device": "cpu",
    "sample.enable": "true",
    "sample.prompts": '["def ", "import os"]',
    "sample.max_new_tokens": 24,
    "sample.temperature": 0.0,
}
COMPILED: dict[str, object] = {"compile.enable": "true", "sample.freq": 1}
FLOAT8: dict[str, object] = {"float8.enable": "true", "float8.emulate": "true", "compile.enable": "false"}


class Samples(logging.Handler):
    """Collects samples, and log lines about them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @hookimpl
    def titan_sample(self, sample: Any) -> None:
        self.texts.append(sample.text)


def sampled(folder: str, changes: dict[str, object]) -> tuple[list[str], list[str], list[float]]:
    """Train, and return samples, lines of titan-inference's log, and losses of this rank."""
    os.chdir(folder)
    samples, logger = Samples(), logging.getLogger("titan_inference")
    logger.setLevel(logging.INFO)
    logger.addHandler(samples)
    try:
        record = run_recipe("llama3_debug", {**SETTINGS, **changes}, observers=[samples])
    finally:
        logger.removeHandler(samples)
    return samples.texts, samples.lines, record.losses


@pytest.fixture(scope="module")
def alone(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    ((texts, lines, _),) = gloo.run(1, sampled, str(tmp_path_factory.mktemp("alone")), {})
    assert len(texts) == 2 and texts[0] != texts[1] and lines == []
    return texts


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        pytest.param(2, {}, id="FSDP 2", marks=pytest.mark.full),
        pytest.param(2, {TP: 2}, id="TP 2 with SP"),
        pytest.param(
            2, {TP: 2, "parallelism.disable_loss_parallel": "true"}, id="TP 2, whole logits", marks=pytest.mark.full
        ),
        pytest.param(2, {DR: 2}, id="DDP 2", marks=pytest.mark.full),
        pytest.param(1, {"activation_checkpoint.mode": "full"}, id="recomputation"),
        pytest.param(4, {TP: 2}, id="FSDP 2 x TP 2", marks=pytest.mark.full),
    ],
)
def test_the_sample_of_a_mesh_is_that_of_one_device(
    gloo: GlooPool, tmp_path: Path, alone: list[str], ranks: int, mesh: dict[str, object]
) -> None:
    (first, lines, _), *others = gloo.run(ranks, sampled, str(tmp_path), mesh)
    assert first == alone and lines == []
    assert all(texts == [] for texts, _, _ in others)  # rank 0 reports


@pytest.mark.parametrize(("degree", "divided"), [(PP, "layers"), (CP, "sequence")])
def test_a_mesh_that_cannot_generate_says_so_and_trains(gloo: GlooPool, tmp_path: Path, degree: str, divided: str) -> None:
    (texts, lines, losses), (_, other, _) = gloo.run(2, sampled, str(tmp_path), {degree: 2})
    assert texts == [] and len(losses) == 3 and other == []
    assert lines == [f"no samples during this run: {degree} = 2 divides {divided}; `titan generate` reads its checkpoints"]


@pytest.mark.full
@pytest.mark.parametrize("changes", [COMPILED, FLOAT8], ids=["compiled", "float8"])
def test_other_kinds_of_modules_are_sampled_and_train_the_same(
    gloo: GlooPool, tmp_path: Path, changes: dict[str, object]
) -> None:
    for folder in ("with", "without"):
        (tmp_path / folder).mkdir()
    ((texts, _, losses),) = gloo.run(1, sampled, str(tmp_path / "with"), changes)
    assert len(texts) == (6 if changes is COMPILED else 2)
    ((_, _, plain),) = gloo.run(1, sampled, str(tmp_path / "without"), {**changes, "sample.enable": "false"})
    assert losses == plain
