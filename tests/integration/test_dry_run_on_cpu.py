"""One rank of a job of any size takes its step on fake tensors of the CPU, as a dry run with a CPU build of torch does."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest

from titan_core.api import Column, Row, UserError
from titan_core.loop.training import train
from titan_simulate.engine.on_cpu import SETTINGS, TriedRank, try_rank
from titan_testing import tiny
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import make_job
from titan_testing.meshes import CP, DR, EP, PP, SCHEDULE, TP

JOBS: dict[str, tuple[int, int, dict[str, object]]] = {
    # name -> ranks, the rank that is tried, overrides
    "FSDP": (64, 63, {}),
    "HSDP x TP": (16, 5, {DR: 2, TP: 2}),
    "TP, compiled and recomputed": (2, 1, {TP: 2, "compile.enable": "true", "activation_checkpoint.mode": "full"}),
    "CP": (4, 3, {CP: 4}),
    "first stage": (4, 0, {PP: 2, SCHEDULE: "1F1B", "training.local_batch_size": 4}),
    "last stage": (4, 3, {PP: 2, SCHEDULE: "1F1B", "training.local_batch_size": 4}),
}


def tried(folder: str, recipe: str, ranks: int, rank: int, overrides: dict[str, object]) -> TriedRank:
    settings = {**SETTINGS, "training.stop_at_step": 1, "training.global_batch_size": -1, "job.dump_folder": folder}
    return try_rank(make_job(recipe, {**settings, **overrides}, ranks, missing_ok=True), train, rank)


@pytest.mark.parametrize("name", JOBS)
def test_a_step_works(name: str, gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks, rank, overrides = JOBS[name]
    (found,) = gloo.run(1, tried, str(tmp_path_factory.mktemp("run")), "tiny", ranks, rank, overrides)
    assert (found.rank, found.world_size) == (rank, ranks)


def test_experts_are_divided(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.mktemp("run"))
    assert gloo.run(1, tried, folder, "qwen3_moe_debug", 4, 0, {EP: 2})[0].mesh == "dp_shard=4, ep=2"


def peak_of_a_large_model(folder: str) -> int:
    """Return the growth of this process, in KiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tried(folder, "llama3_8b", 8, 0, {"training.local_batch_size": 1})
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_nothing_of_a_large_model_is_allocated(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A layer of Llama 3 8B has 0.8 GB in fp32, and one of eight ranks 4 GB of parameters."""
    assert gloo.run(1, peak_of_a_large_model, str(tmp_path_factory.mktemp("run")))[0] < 700_000


def wrong(folder: str) -> str:
    right = tiny.layout
    swapped = {"layers.*.attention.w[qkv].weight": Row(), "layers.*.attention.wo.weight": Column()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "layout", lambda args: replace(right(args), rules={**right(args).rules, **swapped}))
        with pytest.raises(UserError) as found:
            tried(folder, "tiny", 2, 0, {TP: 2})
    return str(found.value)


def test_what_cannot_work_is_refused(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    (error,) = gloo.run(1, wrong, str(tmp_path_factory.mktemp("run")))
    assert "rules have Row() for 'layers.0.attention.wq.weight', but its layer takes the whole input of region" in error
    with pytest.raises(RuntimeError, match="--rank 4: the job has 4 ranks"):
        gloo.run(1, tried, str(tmp_path_factory.mktemp("run")), "tiny", 4, 4, {})
