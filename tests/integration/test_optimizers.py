"""Optimizers on every kind of mesh: losses and parameters are those of one device, also in a resumed run.

``uv run pytest -m "" tests/integration/test_optimizers.py`` runs all rows of the table."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, run_recipe
from harness.meshes import CP, DR, PP, TP
from harness.quick import rows

SMALL: dict[str, object] = {
    # Rows of the feed-forward matrices do not divide by 4.
    "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 50}",
    "optimizer.lr": 8e-4,
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 2,
    "job.device": "cpu",
}
SPARSE = {"model.args": "{dim = 32, expert_dim = 24}", "training.local_batch_size": 2, "training.global_batch_size": 8}
MUON = {"optimizer.name": "Muon", "muon.dtype": "float32"}
EP = "parallelism.expert_parallel_degree"


@dataclass(frozen=True)
class Job:
    settings: dict[str, object]
    difference: float
    """The largest difference of a parameter's values on a mesh, relative to their norm."""
    recipe: str = "llama3_debug"


JOBS = {
    "Muon": Job(MUON, 1e-5),
    "Muon, experts": Job({**MUON, **SPARSE}, 1e-6, "moe"),
    "MuAdamW": Job({"optimizer.name": "MuAdamW", "mup.base": "{dim = 8, n_heads = 1, n_kv_heads = 1, ffn_dim = 16}"}, 1e-5),
    # Gradients differ in their last bits between meshes, so that a few elements of the state may be rounded otherwise.
    "AdamWBF16": Job({"optimizer.name": "AdamWBF16", "optimizer.lr": 2e-3}, 1e-4),
    "of a third party": Job({"optimizer.name": "GatheredMuon", "gathered_muon.dtype": "float32"}, 1e-5),
}
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2": (2, {}),
    "FSDP 4": (4, {}),
    "DDP 2": (2, {DR: 2}),
    "HSDP 2x2": (4, {DR: 2}),
    "TP 2": (2, {TP: 2}),
    "FSDP x TP": (4, {TP: 2}),
    "HSDP x TP": (8, {DR: 2, TP: 2}),
    "PP 2": (2, {PP: 2}),
    "FSDP x PP": (4, {PP: 2}),
    "FSDP x CP": (4, {CP: 2}),
    "EP 2": (2, {EP: 2}),
    "EP x FSDP": (4, {EP: 2}),
    "EP x HSDP": (4, {EP: 2, DR: 2}),
    "EP x TP": (4, {EP: 2, TP: 2}),
    "EP x PP": (4, {EP: 2, PP: 2}),
}
ROWS = {
    "Muon": [mesh for mesh in MESHES if "EP" not in mesh],
    "Muon, experts": ["FSDP 2", "EP 2", "EP x FSDP", "EP x HSDP", "EP x TP", "EP x PP"],
    "MuAdamW": ["FSDP 2", "DDP 2", "TP 2", "PP 2"],
    "AdamWBF16": ["FSDP 2", "TP 2", "PP 2", "FSDP x TP"],
    "of a third party": ["FSDP 2", "TP 2", "FSDP x TP", "PP 2"],
}
RESUMED = ["Muon on FSDP 2", "Muon on TP 2", "AdamWBF16 on FSDP 2", "of a third party on FSDP 2", "of a third party on TP 2"]
Train = Callable[..., list[RunRecord]]
Reference = Callable[[str], RunRecord]


def run_with(sites: list[str], folder: str, recipe: str, overrides: dict[str, object]) -> RunRecord:
    """Train in this process, with the packages in ``sites``."""
    os.chdir(folder)
    sys.path[:0] = sites
    try:
        return run_recipe(recipe, overrides, weights=True)
    finally:
        del sys.path[: len(sites)]


@pytest.fixture(scope="module")
def sites(site_of: Callable[[str], str]) -> list[str]:
    return [site_of("titan-model-moe"), site_of("titan-optim-muon")]


@pytest.fixture(scope="module")
def train(gloo: GlooPool, sites: list[str], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains a job on several ranks, in a new folder or in one that is given."""

    def train(name: str, ranks: int, mesh: dict[str, object], folder: Path | None = None) -> list[RunRecord]:
        job, place = JOBS[name], str(folder or tmp_path_factory.mktemp("run"))
        return gloo.run(ranks, run_with, sites, place, job.recipe, {**SMALL, **job.settings, **mesh})

    return train


@pytest.fixture(scope="module")
def one_device(train: Train) -> Reference:
    return functools.cache(lambda name: train(name, 1, {})[0])


@pytest.mark.parametrize(
    "row",
    rows([f"{name} on {mesh}" for name, meshes in ROWS.items() for mesh in meshes], ["Muon on FSDP 2", "MuAdamW on TP 2"]),
)
def test_a_mesh_trains_as_one_device(train: Train, one_device: Reference, row: str) -> None:
    name, mesh = row.split(" on ")
    one, final = one_device(name), {}
    for record in train(name, *MESHES[mesh]):
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
        assert all(torch.equal(tensor, one.initial[key]) for key, tensor in record.initial.items())
        final.update(record.final)
    assert final.keys() == one.final.keys()
    for key, tensor in one.final.items():
        assert (final[key] - tensor).norm() <= JOBS[name].difference * tensor.norm(), key


@pytest.mark.full
@pytest.mark.parametrize("row", RESUMED)
def test_it_resumes_bit_for_bit_and_on_another_mesh(train: Train, tmp_path: Path, row: str) -> None:
    name, mesh = row.split(" on ")

    def run(ranks: int, **more: object) -> list[RunRecord]:
        return train(name, ranks, {**MESHES[mesh][1], "job.dump_folder": "run", **more}, tmp_path)

    whole = run(2, **{"job.dump_folder": "whole"})
    saved = {"checkpoint.enable": "true"}
    run(2, **saved, **{"training.stop_at_step": 2})
    for one, other in zip(whole, run(2, **saved), strict=True):
        assert other.losses == one.losses[2:]
        assert all(torch.equal(one.final[key], tensor) for key, tensor in other.final.items())
    for ranks, degrees in ((1, {TP: 1}), (4, {TP: 2})):
        for record in run(ranks, **saved, **degrees, **{"checkpoint.load_step": 2}):
            assert record.losses == pytest.approx(whole[0].losses[2:], rel=1e-6)


def count_sent(sites: list[str], folder: str, overrides: dict[str, object]) -> int:
    """Return the bytes that this rank sends to others for the updates of one step of Muon."""
    sent, original = 0, dist.all_to_all_single

    def counting(output: torch.Tensor, given: torch.Tensor, *args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += given.nbytes  # without what stays on this rank
        return original(output, given, *args, **options)

    dist.all_to_all_single = counting
    try:
        run_with(sites, folder, "llama3_debug", {**SMALL, **MUON, **overrides})
    finally:
        dist.all_to_all_single = original
    return sent


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_a_rank_sends_its_shards_and_as_many_elements_of_updates(
    gloo: GlooPool, sites: list[str], one_device: Reference, tmp_path: Path, dtype: str
) -> None:
    """A step sends at most 1.1 times what FSDP sends for AdamW, one reduce-scatter and one all-gather of all parameters in
    fp32, and one copy of the matrices."""
    settings = {"training.steps": 1, "lr_scheduler.warmup_steps": 1, "muon.dtype": dtype}
    sent = sum(gloo.run(4, count_sent, sites, str(tmp_path), settings))
    parameters = one_device("Muon").final
    hidden = sum(one.numel() for name, one in parameters.items() if name.startswith("layers") and one.dim() == 2)
    size = 4 if dtype == "float32" else 2
    # Three quarters of each matrix go to its owner, and three quarters of its update back. Each rank sends to three others.
    assert sent == 2 * 0.75 * hidden * size
    of_adamw = 2 * 3 * 4 * sum(one.numel() for one in parameters.values())
    assert of_adamw + sent <= 1.1 * (of_adamw + 4 * hidden)
