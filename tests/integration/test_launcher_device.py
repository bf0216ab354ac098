"""The launcher does not use the GPUs, which belong to its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from titan_core.cli.main import main

USES_CUDA = ("_lazy_init", "init", "set_device", "get_device_properties", "get_device_capability", "get_device_name")


@pytest.fixture
def guarded_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that may be counted but not used."""

    def used(*arguments: object, **keywords: object) -> None:
        raise AssertionError("the launcher uses CUDA")

    for name in USES_CUDA:
        monkeypatch.setattr(torch.cuda, name, used)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def in_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("guarded_gpus", "in_new_folder")
def test_the_launcher_counts_gpus_and_creates_no_cuda_context(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(
        "titan_launch.launch.launch", lambda settings, options, per_node, *rest: started.append(per_node) or 0
    )
    command = ["train", "llama3_debug", "--nproc-per-node", "gpu", "--job.device", "cuda"]
    assert main([*command, "--float8.enable", "true"]) == 0  # the ranks check whether their GPU has float8
    assert started == [2]


@pytest.mark.full
@pytest.mark.usefixtures("guarded_gpus", "in_new_folder")
def test_not_while_the_ranks_train_either() -> None:
    """The ranks are other processes, which see that this machine has no GPU, or use it."""
    command = ["train", "tiny", "--nproc-per-node", "2", "--training.steps", "1", "--job.device", "cpu"]
    assert main([*command, "--model.args.n_layers", "1"]) == 0
