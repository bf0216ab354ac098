"""The examples, installed like packages of third parties, train on every mesh as on one device, without changes to Titan."""

from __future__ import annotations

import functools
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord
from harness.meshes import CP, PP, TP
from harness.quick import rows
from harness.third_party import TINY_LLAMA, install, train_with
from titan_core.cli.main import main

SMALL: dict[str, object] = {
    "training.seq_len": 48,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 1,
}
LLAMA: dict[str, object] = {**TINY_LLAMA, "training.steps": 3, "validation.enable": "true", "validation.freq": 3}
HYBRID: dict[str, object] = {
    **SMALL,
    "model.args": "{dim = 32, recurrent_dim = 48, n_layers = 4, n_heads = 2, divide_sequences = true}",
}
Z_LOSS: dict[str, object] = {
    **LLAMA,
    "objective.name": "next_token_z_loss",
    "z_loss.coefficient": 0.05,
    "validation.dataset": "stdlib",
    "validation.steps": 1,
}
DPO: dict[str, object] = {
    **LLAMA,
    "training.seq_len": 64,
    "training.dataset": "preferences",
    "training.dataset_path": "pairs.jsonl",
    "data.document_mask": "true",
    "objective.name": "dpo",
    "dpo.beta": 0.2,
    "lr_scheduler.warmup_steps": 1,
    "optimizer.lr": 1e-3,
    "validation.dataset": "preferences",
    "validation.dataset_path": "pairs.jsonl",
}
DISTILLATION: dict[str, object] = {
    **LLAMA,
    "training.global_batch_size": 4,
    "lr_scheduler.warmup_steps": 1,
    "objective.name": "distillation",
    "validation.dataset": "stdlib",
    "validation.steps": 1,
}
TEACHER: dict[str, object] = {
    **TINY_LLAMA,
    "model.args": "{dim = 64, n_layers = 4, n_heads = 4, n_kv_heads = 4, ffn_dim = 96}",
    "training.steps": 3,
    "training.seed": 7,
    "checkpoint.enable": "true",
    "job.dump_folder": "teacher",
}
INT8: dict[str, object] = {
    **TINY_LLAMA,
    "int8_qat.enable": "true",
    "int8_qat.bits": 4,
    "activation_checkpoint.mode": "selective",
}


@dataclass(frozen=True)
class Example:
    """A job of an example."""

    package: str
    recipe: str
    settings: dict[str, object]
    losses: float = 2e-6
    """The largest relative difference of losses."""
    norms: float = 1e-4
    """That of gradient norms."""


EXAMPLES = {
    "a model": Example("titan-model-tinygpt", "tinygpt", {**SMALL, "training.steps": 6, "model.args.dropout": 0.1}, 1e-5),
    "GPT-2": Example(
        "titan-model-gpt2",
        "gpt2",
        {**SMALL, "model.args": "{dim = 32, n_layers = 2, n_heads = 2, vocab_size = 288, max_seq_len = 64}"},
    ),
    "a hybrid": Example("titan-model-hybrid", "hybrid", HYBRID),
    "a hybrid of documents": Example("titan-model-hybrid", "hybrid", {**HYBRID, "data.document_mask": "true"}),
    "z-loss": Example("titan-objective-z-loss", "llama3_debug", Z_LOSS, 1e-6, 1e-5),
    "DPO": Example("titan-dpo", "llama3_debug", DPO),
    "distillation": Example("titan-distillation", "llama3_debug", DISTILLATION),
    "its teacher": Example("titan-distillation", "llama3_debug", TEACHER),
    # The last bit of a scale decides how a weight midway between two grid points is rounded.
    "int8": Example("titan-int8-qat", "llama3_debug", INT8, 1e-4, 1e-2),
    "exact": Example("titan-int8-qat", "llama3_debug", TINY_LLAMA),
}
CHUNK = "objective.chunk_tokens"
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2": (2, {}),
    "TP 2": (2, {TP: 2}),
    "TP 2, chunks": (2, {TP: 2, CHUNK: 20}),
    "TP 2, whole logits": (2, {TP: 2, "parallelism.disable_loss_parallel": "true"}),
    "PP 2": (2, {PP: 2}),
    "PP 2, chunks": (2, {PP: 2, CHUNK: 7}),
    "CP 2": (2, {CP: 2}),
    "CP 2, chunks": (2, {CP: 2, CHUNK: 30}),
    "FSDP x TP": (4, {TP: 2}),
    "FSDP x TP, selective": (4, {TP: 2, "activation_checkpoint.mode": "selective"}),
    "TP x CP": (4, {TP: 2, CP: 2}),
    "TP x PP": (4, {TP: 2, PP: 2}),
    "TP x PP x CP": (8, {TP: 2, PP: 2, CP: 2}),
    "FSDP x TP x PP x CP": (16, {TP: 2, PP: 2, CP: 2}),
}
QUICK = ["a model on PP 2"]
FULL = [
    f"{name} on {mesh}"
    for name, meshes in {
        "a model": ("FSDP 2", "TP x CP"),
        "GPT-2": ("FSDP 2", "TP 2", "CP 2", "PP 2"),
        "a hybrid": ("FSDP 2", "TP 2", "PP 2", "CP 2"),
        "a hybrid of documents": ("TP 2", "CP 2"),
        "z-loss": ("TP 2, chunks", "TP 2, whole logits", "PP 2, chunks", "CP 2, chunks", "FSDP x TP"),
        "DPO": ("FSDP 2", "TP 2", "PP 2", "CP 2"),
        "distillation": ("FSDP 2", "TP 2, chunks", "PP 2, chunks", "CP 2"),
        "int8": ("FSDP x TP", "PP 2", "CP 2"),
    }.items()
    for mesh in meshes
]
LONG = [
    "a model on TP x PP x CP", "a model on FSDP x TP x PP x CP", "GPT-2 on TP x CP", "a hybrid on TP x CP",
    "a hybrid on FSDP x TP, selective", "DPO on TP x CP", "distillation on TP x PP",
]  # fmt: skip
Train = Callable[..., list[RunRecord]]
OneDevice = Callable[[str], RunRecord]


def write_pairs(folder: Path) -> None:
    """Write prompts with a chosen and a rejected answer."""
    rejected = (" I would rather not say it", " no idea", " no idea")
    pairs = [{"prompt": f"{n} + {n}?", "chosen": f" {2 * n}", "rejected": rejected[n % 3]} for n in range(24)]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))


@pytest.fixture(scope="module")
def train(gloo: GlooPool, site_of: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains an example on several ranks, in a new folder or in one that is given."""

    def train(name: str, ranks: int, more: dict[str, object] | None = None, folder: Path | None = None) -> list[RunRecord]:
        example, folder = EXAMPLES[name], folder or tmp_path_factory.mktemp("run")
        write_pairs(folder)
        settings = {**example.settings, **({"distillation.teacher": teacher()} if name == "distillation" else {})}
        overrides = {**settings, **(more or {})}
        results = gloo.run(ranks, train_with, site_of(example.package), str(folder), example.recipe, overrides)
        return [record for record, _ in results]

    @functools.cache
    def teacher() -> str:
        folder = tmp_path_factory.mktemp("teacher")
        train("its teacher", 1, folder=folder)
        return str(folder / "teacher")

    return train


@pytest.fixture(scope="module")
def one_device(train: Train) -> OneDevice:
    return functools.cache(lambda name: train(name, 1)[0])


@pytest.mark.parametrize("row", rows([*QUICK, *FULL, *LONG], QUICK, FULL))
def test_an_example_trains_as_on_one_device(train: Train, one_device: OneDevice, row: str) -> None:
    name, mesh = row.split(" on ")
    example, one = EXAMPLES[name], one_device(name)
    for record in train(name, *MESHES[mesh]):
        assert record.losses == pytest.approx(one.losses, rel=example.losses)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=example.norms)
        for found, expected in zip(record.metrics, one.metrics, strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert record.validation.keys() == one.validation.keys()
        for step, measured in one.validation.items():
            assert record.validation[step] == pytest.approx(measured, rel=example.losses)
            assert record.validation_metrics[step] == pytest.approx(one.validation_metrics[step], rel=1e-5, abs=1e-6)


@pytest.mark.full
def test_a_penalty_on_the_normaliser_is_part_of_the_loss(train: Train, one_device: OneDevice) -> None:
    one, (plain,) = one_device("z-loss"), train("z-loss", 1, {"z_loss.coefficient": 0.0})
    assert one.losses[0] - plain.losses[0] == pytest.approx(0.05 * one.metrics[0]["normaliser"], rel=1e-5)
    assert one.losses[0] > 1.1 * plain.losses[0]
    assert one.validation[3][0] > 1.1 * plain.validation[3][0]


@pytest.mark.full
def test_a_policy_begins_at_its_reference_and_learns_to_prefer(one_device: OneDevice) -> None:
    one = one_device("DPO")
    assert one.losses[0] == pytest.approx(math.log(2.0), rel=1e-6)
    assert one.metrics[0] == {"margin": 0.0, "accuracy": 0.0}
    assert 0.3 < one.losses[2] < 0.9 * one.losses[0]
    assert 0.05 < one.metrics[2]["margin"] < 2.0 and one.metrics[2]["accuracy"] > 0.7
    assert one.validation_metrics[3]["accuracy"] > 0.7


@pytest.mark.full
def test_a_resumed_run_has_the_same_reference(train: Train, one_device: OneDevice, tmp_path: Path) -> None:
    """The reference is the model that the run started from, and not the one that it resumed."""
    saved = {"checkpoint.enable": "true", "checkpoint.interval": 2}
    train("DPO", 1, {**saved, "training.stop_at_step": 2}, tmp_path)
    (resumed,) = train("DPO", 1, saved, tmp_path)
    assert resumed.losses == one_device("DPO").losses[2:] and resumed.metrics == one_device("DPO").metrics[2:]


@pytest.mark.full
def test_a_student_comes_closer_to_its_teacher(one_device: OneDevice) -> None:
    one = one_device("distillation")
    divergences = [step["divergence"] for step in one.metrics]
    assert divergences[0] > 1e-3 and divergences[2] < divergences[0]
    for loss, step in zip(one.losses, one.metrics, strict=True):
        assert loss == pytest.approx(0.5 * 4.0 * step["divergence"] + 0.5 * step["cross_entropy"], rel=1e-6)


@pytest.mark.full
def test_a_precision_rounds_what_is_computed(one_device: OneDevice) -> None:
    exact, rounded = one_device("exact").losses, one_device("int8").losses
    assert rounded != pytest.approx(exact, rel=1e-5)
    assert rounded == pytest.approx(exact, rel=0.02)


@pytest.mark.full
def test_a_model_trains_under_fsdp_by_command(tmp_path: Path) -> None:
    environment = install(tmp_path / "site", "titan-model-tinygpt")

    def titan(*arguments: str) -> str:
        command = [sys.executable, "-m", "titan_core", *arguments]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    listing = json.loads(titan("plugins", "--json"))
    assert "titan-model-tinygpt" in {plugin["distribution"] for plugin in listing["plugins"]}
    titan("train", "tinygpt", "--nproc-per-node", "2", "--training.steps", "8", "--job.device", "cpu")
    lines = (tmp_path / "outputs" / "tinygpt" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0] - 0.3


def errors_of_losses(site: str, folder: str) -> tuple[int, list[str]]:
    """Train with preferences, and ask for the losses of documents. Return the exit status and the errors."""
    saved = {"checkpoint.enable": "true", "checkpoint.interval": 2, "validation.enable": "false"}
    train_with(site, folder, "llama3_debug", {**DPO, **saved, "job.dump_folder": "run"})
    lines = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stderr(lines):
        patched.syspath_prepend(site)
        status = main(["data", "step", "run", "3", "--loss"])
    return status, [line for line in lines.getvalue().splitlines() if line.startswith("titan: error: ")]


@pytest.mark.full
def test_documents_compared_with_a_reference_have_no_losses(
    gloo: GlooPool, site_of: Callable[[str], str], tmp_path: Path
) -> None:
    write_pairs(tmp_path)
    ((status, (error,)),) = gloo.run(1, errors_of_losses, site_of("titan-dpo"), str(tmp_path))
    assert status == 2 and error.endswith("; drop --loss")
    assert 'objective.name = "dpo": compares with a reference model' in error
