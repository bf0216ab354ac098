"""Third-party packages work when they are installed next to Titan's, without changes to Titan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.gloo_pool import GlooPool
from harness.third_party import TINY_LLAMA, install, train_with


@pytest.mark.full
def test_a_third_party_model_trains_under_fsdp_by_command(tmp_path: Path) -> None:
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


SHORT: dict[str, object] = {
    "training.steps": 6,
    "training.global_batch_size": 8,
    "training.local_batch_size": 2,
    "model.args.dropout": 0.1,
}


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        pytest.param(2, {}, marks=pytest.mark.full),
        (2, {"pipeline": 2}),
        pytest.param(4, {"tensor": 2, "context": 2}, marks=pytest.mark.full),
        pytest.param(8, {"tensor": 2, "pipeline": 2, "context": 2}, marks=pytest.mark.long),
        pytest.param(16, {"tensor": 2, "pipeline": 2, "context": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_third_party_model_is_divided_in_every_way(
    gloo: GlooPool, tmp_path: Path, ranks: int, degrees: dict[str, int]
) -> None:
    install(tmp_path / "site", "titan-model-tinygpt")
    site, folder = str(tmp_path / "site"), str(tmp_path)
    mesh = {f"parallelism.{name}_parallel_degree": degree for name, degree in degrees.items()}
    ((one, _),) = gloo.run(1, train_with, site, folder, "tinygpt", SHORT)
    for record, _ in gloo.run(ranks, train_with, site, folder, "tinygpt", {**SHORT, **mesh}):
        assert record.losses == pytest.approx(one.losses, rel=1e-5)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)


@pytest.mark.full
def test_a_third_party_parallelism_trains_llama_in_islands(gloo: GlooPool, tmp_path: Path) -> None:
    install(tmp_path / "site", "titan-local-sgd")
    site, folder, name = str(tmp_path / "site"), str(tmp_path), "layers.0.attention.wq.weight"
    islands = {**TINY_LLAMA, "local_sgd.islands": 2, "local_sgd.sync_every": 3}
    (record, here), (_, there) = gloo.run(2, train_with, site, folder, "llama3_debug", islands, [name])
    equal = [torch.equal(*pair) for pair in zip(here[name], there[name], strict=True)]
    assert equal == [False, False, True, False, False, True]
    assert record.losses[-1] < record.losses[0]
    # Tensor parallelism within each island changes nothing.
    divided = {**islands, "parallelism.tensor_parallel_degree": 2}
    for other, _ in gloo.run(4, train_with, site, folder, "llama3_debug", divided):
        assert other.losses == pytest.approx(record.losses, rel=1e-5)


@pytest.mark.full
def test_islands_with_the_same_data_train_as_one_device(gloo: GlooPool, tmp_path: Path) -> None:
    """Each island then has the gradients, gradient norm and loss of one device, not half or twice as much."""
    install(tmp_path / "site", "titan-local-sgd")
    line = json.dumps({"text": "the same words again and again, " * 40})
    (tmp_path / "same.jsonl").write_text((line + "\n") * 64)
    site, folder = str(tmp_path / "site"), str(tmp_path)
    same = {**TINY_LLAMA, "training.dataset": "json", "training.dataset_path": "same.jsonl"}
    ((one, _),) = gloo.run(1, train_with, site, folder, "llama3_debug", same)
    mean = {"local_sgd.islands": 2, "local_sgd.sync_every": 2, "local_sgd.outer_lr": 1.0, "local_sgd.outer_momentum": 0.0}
    for record, _ in gloo.run(2, train_with, site, folder, "llama3_debug", {**same, **mean}):
        assert record.losses == pytest.approx(one.losses, rel=1e-5)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("stop", [4, 6])
def test_islands_resume_bit_for_bit(gloo: GlooPool, tmp_path: Path, stop: int) -> None:
    """Both between synchronisations, when the islands' weights differ, and after one: the outer momentum is saved too."""
    install(tmp_path / "site", "titan-local-sgd")
    site, folder, name = str(tmp_path / "site"), str(tmp_path), "layers.0.attention.wq.weight"
    islands = {**TINY_LLAMA, "training.steps": 9, "local_sgd.islands": 2, "local_sgd.sync_every": 3}
    saved = {**islands, "checkpoint.enable": "true", "checkpoint.async_mode": "async", "job.dump_folder": "run"}
    whole = gloo.run(2, train_with, site, folder, "llama3_debug", {**islands, "job.dump_folder": "whole"}, [name])
    gloo.run(2, train_with, site, folder, "llama3_debug", {**saved, "training.stop_at_step": stop})
    resumed = gloo.run(2, train_with, site, folder, "llama3_debug", saved, [name])
    for (one, weights), (other, weights_resumed) in zip(whole, resumed, strict=True):
        assert other.losses == one.losses[stop:]
        assert all(torch.equal(*pair) for pair in zip(weights[name][stop:], weights_resumed[name], strict=True))


@pytest.mark.full
def test_weights_of_islands_start_another_run_only_if_they_are_equal(gloo: GlooPool, tmp_path: Path) -> None:
    install(tmp_path / "site", "titan-local-sgd")
    site, folder = str(tmp_path / "site"), str(tmp_path)
    islands = {**TINY_LLAMA, "local_sgd.islands": 2, "local_sgd.sync_every": 3, "checkpoint.enable": "true"}
    islands |= {"checkpoint.interval": 1, "training.steps": 4, "training.stop_at_step": 4, "job.dump_folder": "run"}
    gloo.run(2, train_with, site, folder, "llama3_debug", {**islands, "training.steps": 5})
    alone = {**TINY_LLAMA, "training.steps": 1, "checkpoint.enable": "true", "job.dump_folder": "alone"}
    with pytest.raises(RuntimeError, match=r"step-4: its 2 replicas have different weights in model\."):
        gloo.run(
            1, train_with, site, folder, "llama3_debug", {**alone, "checkpoint.initial_load_path": "run/checkpoint/step-4"}
        )
    met = {**alone, "checkpoint.initial_load_path": "run/checkpoint/step-3"}
    ((record, _),) = gloo.run(1, train_with, site, folder, "llama3_debug", met)
    assert record.losses
    # A run with one replica cannot resume a run with two, whatever allow_changed says.
    one = {**islands, "local_sgd.islands": 1, "checkpoint.allow_changed": '["*"]'}
    with pytest.raises(RuntimeError, match="it contains 2 diverging replicas of the model, but this job trains 1"):
        gloo.run(2, train_with, site, folder, "llama3_debug", one)


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        pytest.param(4, {"tensor": 2}, marks=pytest.mark.full),
        (2, {"pipeline": 2}),
        pytest.param(2, {"context": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_third_party_precision_trains_llama_on_any_mesh(
    gloo: GlooPool, tmp_path: Path, ranks: int, degrees: dict[str, int]
) -> None:
    install(tmp_path / "site", "titan-int8-qat")
    site, folder = str(tmp_path / "site"), str(tmp_path)
    rounded = {**TINY_LLAMA, "int8_qat.enable": "true", "int8_qat.bits": 4, "activation_checkpoint.mode": "selective"}
    ((one, _),) = gloo.run(1, train_with, site, folder, "llama3_debug", rounded)
    ((exact, _),) = gloo.run(1, train_with, site, folder, "llama3_debug", TINY_LLAMA)
    assert one.losses != pytest.approx(exact.losses, rel=1e-5)
    assert one.losses == pytest.approx(exact.losses, rel=0.02)
    mesh = {f"parallelism.{name}_parallel_degree": degree for name, degree in degrees.items()}
    for record, _ in gloo.run(ranks, train_with, site, folder, "llama3_debug", {**rounded, **mesh}):
        # The last bit of the scale decides how a weight midway between two grid points is rounded.
        assert record.losses == pytest.approx(one.losses, rel=1e-4)
