"""Muon of titan-optim on every kind of mesh: losses and parameters are those of one device.

``uv run pytest -m "full or not full" tests/integration/test_muon.py`` runs all rows of the table."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, run_recipe
from harness.meshes import CP, DR, PP, TP

MUON: dict[str, object] = {
    "optimizer.name": "Muon",
    "optimizer.lr": 8e-4,
    "muon.dtype": "float32",
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "training.steps": 4,
    "lr_scheduler.warmup_steps": 2,
    "job.device": "cpu",
}
DENSE = {**MUON, "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 50}"}
"""Rows of the feed-forward matrices do not divide by 4."""
SPARSE = {
    **MUON,
    "model.args": "{dim = 32, expert_dim = 24}",
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
}
EP = "parallelism.expert_parallel_degree"

Reference = Callable[[str], RunRecord]


def train(site: str, folder: str, recipe: str, overrides: dict[str, object]) -> RunRecord:
    """Train in this process, with the packages in ``site``."""
    os.chdir(folder)
    sys.path.insert(0, site)
    try:
        return run_recipe(recipe, overrides, weights=True)
    finally:
        sys.path.remove(site)


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, experts: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    @functools.cache
    def trained(model: str) -> RunRecord:
        return trained_on(gloo, 1, model, experts, tmp_path_factory.mktemp(model), {})[0]

    return trained


def trained_on(
    gloo: GlooPool, ranks: int, model: str, experts: str, folder: Path, mesh: dict[str, object]
) -> list[RunRecord]:
    recipe, settings = ("moe", SPARSE) if model == "moe" else ("llama3_debug", DENSE)
    return gloo.run(ranks, train, experts, str(folder), recipe, {**settings, **mesh})


def require_same(records: list[RunRecord], one: RunRecord) -> None:
    final = {}
    for record in records:
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        final.update(record.final)
    assert final.keys() == one.final.keys()
    for name, tensor in one.final.items():
        torch.testing.assert_close(final[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


ROWS: dict[str, tuple[str, int, dict[str, object]]] = {
    "FSDP 4": ("llama", 4, {}),
    "EP 2 x FSDP 2": ("moe", 4, {EP: 2}),
    "FSDP 2": ("llama", 2, {}),
    "HSDP 2x2": ("llama", 4, {DR: 2}),
    "DDP 2": ("llama", 2, {DR: 2}),
    "TP 2": ("llama", 2, {TP: 2}),
    "FSDP 2 x TP 2": ("llama", 4, {TP: 2}),
    "PP 2": ("llama", 2, {PP: 2}),
    "FSDP 2 x PP 2": ("llama", 4, {PP: 2}),
    "FSDP 2 x CP 2": ("llama", 4, {CP: 2}),
    "HSDP 2x2 x TP 2": ("llama", 8, {DR: 2, TP: 2}),
    "experts, FSDP 2": ("moe", 2, {}),
    "EP 2": ("moe", 2, {EP: 2}),
    "EP 2 x HSDP": ("moe", 4, {EP: 2, DR: 2}),
    "EP 2 x TP 2": ("moe", 4, {EP: 2, TP: 2}),
    "EP 2 x PP 2": ("moe", 4, {EP: 2, PP: 2}),
}
"""Model, ranks and mesh."""
QUICK = ("FSDP 4", "EP 2")


@pytest.mark.parametrize(
    ("model", "ranks", "mesh"),
    [pytest.param(*row, id=name, marks=[] if name in QUICK else pytest.mark.full) for name, row in ROWS.items()],
)
def test_a_mesh_trains_as_one_device(
    gloo: GlooPool, one_device: Reference, experts: str, tmp_path: Path, model: str, ranks: int, mesh: dict[str, object]
) -> None:
    require_same(trained_on(gloo, ranks, model, experts, tmp_path, mesh), one_device(model))


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{}, {TP: 2}], ids=["FSDP 2", "TP 2"])
def test_it_resumes_bit_for_bit_and_on_another_mesh(
    gloo: GlooPool, experts: str, tmp_path: Path, mesh: dict[str, object]
) -> None:
    def run(ranks: int, **more: object) -> list[RunRecord]:
        return trained_on(gloo, ranks, "llama", experts, tmp_path, {**mesh, "job.dump_folder": "run", **more})

    whole = run(2, **{"job.dump_folder": "whole"})
    saved = {"checkpoint.enable": "true"}
    run(2, **saved, **{"training.stop_at_step": 2})
    for one, other in zip(whole, run(2, **saved), strict=True):
        assert other.losses == one.losses[2:]
        assert all(torch.equal(one.final[name], tensor) for name, tensor in other.final.items())
    for ranks, degrees in ((1, {TP: 1}), (4, {TP: 2})):
        for record in run(ranks, **saved, **degrees, **{"checkpoint.load_step": 2}):
            assert record.losses == pytest.approx(whole[0].losses[2:], rel=1e-6)


def count_sent(site: str, folder: str, overrides: dict[str, object]) -> int:
    """Return the bytes that this rank sends to others for the updates of one step."""
    sent, original = 0, dist.all_to_all_single

    def counting(output: torch.Tensor, given: torch.Tensor, *args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += given.nbytes  # without what stays on this rank
        return original(output, given, *args, **options)

    dist.all_to_all_single = counting
    try:
        train(site, folder, "llama3_debug", {**DENSE, **overrides})
    finally:
        dist.all_to_all_single = original
    return sent


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_a_rank_sends_its_shards_and_as_many_elements_of_updates(
    gloo: GlooPool, experts: str, one_device: Reference, tmp_path: Path, dtype: str
) -> None:
    """A step sends at most 1.1 times what FSDP sends for AdamW, one reduce-scatter and one all-gather of all parameters in
    fp32, and one copy of the matrices."""
    settings = {"training.steps": 1, "lr_scheduler.warmup_steps": 1, "muon.dtype": dtype}
    sent = sum(gloo.run(4, count_sent, experts, str(tmp_path), settings))
    parameters = one_device("llama").final
    hidden = sum(one.numel() for name, one in parameters.items() if name.startswith("layers") and one.dim() == 2)
    size = 4 if dtype == "float32" else 2
    # Three quarters of each matrix go to its owner, and three quarters of its update back. Each rank sends to three others.
    assert sent == 2 * 0.75 * hidden * size
    of_adamw = 2 * 3 * 4 * sum(one.numel() for one in parameters.values())
    assert of_adamw + sent <= 1.1 * (of_adamw + 4 * hidden)
