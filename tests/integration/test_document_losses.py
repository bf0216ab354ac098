"""The losses of a step's documents (`titan data step --loss`): those of plain torch, and together that of training."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness import oracle
from harness.hand_read import byte_ids, printed, rows_by_hand, text_at
from harness.quick import rows
from harness.recorded_runs import LENGTH, SETTINGS, error_of, write_data
from harness.staged import run_staged, write_recipe
from titan_core.api import Dropout
from titan_core.cli.main import main
from titan_core.model.next_token import NextToken
from titan_testing import tiny_model
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe

SAVED: dict[str, object] = {
    **SETTINGS,
    "training.steps": 10,
    "checkpoint.interval": 4,
    "checkpoint.keep_latest_k": 0,
    "metrics.log_freq": 1,
}


def recorded(run: Path) -> dict[int, float]:
    """Return the loss that the run has recorded of each step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def losses_of(capsys: pytest.CaptureFixture[str], step: int, *more: object, run: str = "run") -> dict[str, Any]:
    found = printed(capsys, "data", "step", run, step, "--loss", *more)
    assert isinstance(found, dict)
    return found


def mean_of(documents: Iterable[dict[str, Any]]) -> float:
    counted = [(one["loss"], one["targets"]) for one in documents if one["targets"]]
    return float(sum(loss * targets for loss, targets in counted) / sum(targets for _, targets in counted))


def require_that_of_training(found: dict[str, Any], step: int, run: Path) -> None:
    assert found["weights_of_step"] == step - 1
    expected = pytest.approx(recorded(run)[step], abs=1e-6)
    assert mean_of(found["documents"]) == expected and found["loss"] == expected


CASES: dict[str, dict[str, object]] = {
    "concatenated": {"data.packing": "concatenate"},
    "masked": {"data.packing": "best_fit", "data.document_mask": "true", "objective.chunk_tokens": 7},
    "chunks": {"data.packing": "concatenate", "objective.chunk_tokens": 5},
    "one batch": {"data.packing": "best_fit", "training.local_batch_size": 4},
    "bf16": {"data.packing": "concatenate", "training.mixed_precision_param": "bfloat16"},
}


@pytest.mark.parametrize("case", rows(CASES, quick=("masked",)))
def test_the_mean_is_the_loss_of_training(case: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(in_tmp)
    run_recipe("tiny", {**SAVED, **CASES[case]})
    for step in (5, 9):
        found = losses_of(capsys, step)
        require_that_of_training(found, step, in_tmp / "run")
        listed = printed(capsys, "data", "step", "run", step)["documents"]
        assert [{key: one[key] for key in listed[0]} for one in found["documents"]] == listed
        assert any(one["tokens"] < one["of"] for one in listed)
    assert {one["dataset"] for one in listed} == {"lines", "rows"}
    older = losses_of(capsys, 8)
    assert older["weights_of_step"] == 4 and abs(older["loss"] - recorded(in_tmp / "run")[8]) > 1e-5


@pytest.mark.parametrize("masked", ["true", "false"])
def test_each_loss_is_that_of_plain_torch(masked: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model, its masks and the sequences are written by hand. Titan computes the losses in chunks of positions."""
    write_data(in_tmp)
    settings = {
        **SAVED,
        "training.steps": 4,
        "data.document_mask": masked,
        "optimizer.lr": 1e-2,
        "objective.chunk_tokens": 7,
    }
    weights = run_recipe("llama3_debug", settings, weights=True).final
    found = losses_of(capsys, 5)["documents"]
    rows = torch.tensor(rows_by_hand(found, LENGTH, lambda place: byte_ids(text_at(place))))
    documents, starts = torch.zeros_like(rows), torch.zeros_like(rows)
    places: list[tuple[int, int]] = []
    for number, one in enumerate(found):
        before = [two["tokens"] for two in found[:number] if two["row"] == one["row"]]
        places.append((sum(before), sum(before) + one["tokens"]))
        if masked == "true":
            documents[one["row"], slice(*places[-1])], starts[one["row"], slice(*places[-1])] = len(before), sum(before)
    positions = torch.arange(LENGTH) - starts
    of = oracle.Sequences(rows[:, :-1], rows[:, 1:], positions[:, :-1], documents[:, :-1])
    logits = oracle.logits({name: tensor.double() for name, tensor in weights.items()}, 2, of)
    losses = F.pad(F.cross_entropy(logits.flatten(0, 1), of.targets.flatten(), reduction="none").view_as(of.tokens), (1, 0))
    for one, (first, end) in zip(found, places, strict=True):
        first += first == 0 or masked == "true"
        assert one["targets"] == one["weight"] == end - first
        assert one["loss"] == (pytest.approx(losses[one["row"], first:end].mean().item(), rel=2e-6) if end > first else None)


def train_in(folder: str, settings: dict[str, object]) -> None:
    os.chdir(folder)
    run_recipe("tiny", settings)


MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "fsdp": (2, {"training.local_batch_size": 3, "training.global_batch_size": -1}),
    "tp": (2, {"parallelism.tensor_parallel_degree": 2, "model.args.n_kv_heads": 2}),
    "cp": (2, {"parallelism.context_parallel_degree": 2, "data.document_mask": "true"}),
    "pp": (2, {"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": "1F1B"}),
    "dp and cp": (4, {"parallelism.data_parallel_shard_degree": 2, "parallelism.context_parallel_degree": 2}),
}


@pytest.mark.parametrize("mesh", rows(MESHES, quick=()))
def test_a_run_of_several_ranks(mesh: str, gloo: GlooPool, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(in_tmp)
    ranks, more = MESHES[mesh]
    gloo.run(ranks, train_in, str(in_tmp), {**SAVED, "training.steps": 5, **more})
    require_that_of_training(losses_of(capsys, 5), 5, in_tmp / "run")


@pytest.mark.full
def test_stages_with_other_arguments_of_the_model(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stage begins with the weights of the one before, and computes with another rotation and longer sequences."""
    write_recipe(in_tmp)
    run_staged(str(in_tmp), {"metrics.log_freq": 1, "checkpoint.interval": 2})
    for step in (3, 5, 9):
        require_that_of_training(losses_of(capsys, step, run="outputs/staged"), step, in_tmp / "outputs/staged")


class DroppingEmbedding(tiny_model.StatefulEmbedding):
    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.dropout = Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(super().forward(tokens))


def test_dropout_is_that_of_the_step(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so are the model's buffers, which each forward pass in training changes."""
    monkeypatch.setattr(tiny_model, "StatefulEmbedding", DroppingEmbedding)
    write_data(in_tmp)
    model = {"model.name": "noisy", "model.flavor": "tiny", "model.args": "{draws = false, dropout = 0.0}"}
    run_recipe("tiny", {**SAVED, **model, "training.steps": 5})
    require_that_of_training(losses_of(capsys, 5), 5, in_tmp / "run")


@pytest.mark.full
def test_a_mixture_of_experts(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(in_tmp)
    more = {"training.seq_len": 32, "training.local_batch_size": 2, "training.global_batch_size": 4, "model.args": "{}"}
    run_recipe("qwen3_moe_tiny", {**SAVED, **more, "training.steps": 5})
    require_that_of_training(losses_of(capsys, 5), 5, in_tmp / "run")


def test_the_table_names_the_weights(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(in_tmp)
    run_recipe("tiny", {**SAVED, "training.steps": 6})
    capsys.readouterr()
    for step, weights in ((5, "4, as in training"), (6, "4, but training had taken 5 steps")):
        assert main(["data", "step", "run", str(step), "--loss"]) == 0
        head, *lines, last = capsys.readouterr().out.splitlines()
        found = losses_of(capsys, step)
        assert head.split() == ["row", "dataset", "epoch", "tokens", "loss", "targets", "document"]
        shown = [line.split()[6:8] for line in lines]
        assert shown == [[f"{one['loss']:.4f}", str(one["targets"])] for one in found["documents"]]
        targets = sum(one["targets"] for one in found["documents"])
        assert last == f"loss {found['loss']:.4f} over {targets} targets, with the weights after step {weights}"


def test_without_weights_there_is_one_error(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(in_tmp)
    run_recipe("tiny", {**SAVED, "training.steps": 5})
    error = error_of(capsys, "data", "step", "run", 4, "--loss")
    assert "--loss: the run has no checkpoint of a step before 4" in error and "titan checkpoint list" in error
    run_recipe("tiny", {**SAVED, "training.steps": 2, "checkpoint.enable": "false", "job.dump_folder": "unsaved"})
    assert "the run has no checkpoint" in error_of(capsys, "data", "step", "unsaved", 2, "--loss")


def test_an_objective_of_whole_sequences_is_refused(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(in_tmp)
    monkeypatch.setattr(NextToken, "per_position", False)
    run_recipe("tiny", {**SAVED, "training.steps": 4})
    error = error_of(capsys, "data", "step", "run", 5, "--loss")
    assert 'objective.name = "next_token": is a function of whole sequences' in error and error.endswith("; drop --loss")
