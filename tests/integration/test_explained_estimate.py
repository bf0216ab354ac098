"""``titan estimate --explain``: its rows are the estimate."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.fake_cuda import FakeCuda, why_not
from titan_testing.jobs import make_job

pytest.importorskip("titan_simulate")

if TYPE_CHECKING:
    from titan_simulate.estimate.estimate import Estimate
    from titan_simulate.estimate.explain import Explanation

JOB = {
    "model.args": "{dim = 256, n_layers = 6, n_heads = 8, n_kv_heads = 4, ffn_dim = 512}",
    "training.seq_len": 512,
    "training.local_batch_size": 4,
    "training.global_batch_size": -1,
    "compile.enable": "false",
    "parallelism.fsdp_group_mib": 0.0,  # otherwise FSDP gathers several of these small blocks together: all are simulated
}


def explained(settings: Mapping[str, object], world_size: int) -> tuple[Estimate, Explanation]:
    from titan_core.api.config.resolved import Override
    from titan_core.api.plugins.assembled_job import AssembledJob
    from titan_core.loop.training import train
    from titan_simulate.estimate.estimate import Details, estimate
    from titan_simulate.estimate.explain import explain
    from titan_simulate.hardware.read import read_machine

    def job_of(more: Sequence[Override]) -> AssembledJob:
        own = {**JOB, **settings, **{one.key: one.text for one in more}}
        return make_job("llama3_debug", own, world_size, missing_ok=True)

    made_of: list[Details] = []
    found = estimate(job_of, train, read_machine("h100"), details=made_of.append)
    return found, explain(found, made_of[0])


PARALLEL = "parallelism."
ACCUMULATED = {"training.global_batch_size": 4 * 4 * 8, "activation_checkpoint.mode": "full"}
PIPELINE = {PARALLEL + "pipeline_parallel_degree": 2, "training.local_batch_size": 12}


@pytest.mark.parametrize(
    "settings",
    [{**ACCUMULATED, PARALLEL + "tensor_parallel_degree": 2}, {**PIPELINE, PARALLEL + "pipeline_parallel_schedule": "1F1B"}],
    ids=["accumulation", "pipeline"],
)
def test_the_rows_sum_up_to_the_estimate(fake_cuda: FakeCuda, settings: dict[str, object]) -> None:
    found, why = fake_cuda.call(explained, settings, 4)
    assert sum(row.seconds for row in why.time) == pytest.approx(found.step_seconds, rel=1e-6)
    assert sum(row.gib for row in why.memory) == pytest.approx(found.peak_gib, rel=1e-6)
    assert min(row.seconds for row in why.time) > -1e-3 * found.step_seconds
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * 4)
    for row in why.collectives:
        values = row.calls, row.gib, row.seconds, row.exposed_seconds
        sums[row.operator, row.group] = [one + two for one, two in zip(sums[row.operator, row.group], values, strict=True)]
    for one in found.collectives:
        expected = [one.count, one.bytes / 2**30, one.seconds, one.exposed_seconds]
        assert sums[one.operator, one.group] == pytest.approx(expected, abs=1e-9)
    kinds: Counter[str] = Counter()
    for part in why.time:
        kinds[part.kind] += part.seconds  # type: ignore[assignment]
    assert kinds["exposed communication"] <= sum(one.exposed_seconds for one in found.collectives) + 1e-9
    if "pipeline idle" not in kinds:  # copies of FSDP on its own streams share the time of matmuls
        assert 0.99 * found.seconds["matmul"] < kinds["matmul"] <= found.seconds["matmul"] * (1 + 1e-9)
    else:
        idle = found.bubble * (found.step_seconds - sum(part.seconds for part in why.time if part.phase == "optimizer"))
        assert kinds["pipeline idle"] == pytest.approx(idle, rel=0.1)


def test_parameters_and_the_state_of_the_optimizer_belong_to_modules(fake_cuda: FakeCuda) -> None:
    found, why = fake_cuda.call(explained, {"activation_checkpoint.mode": "full", "objective.chunk_tokens": 512}, 2)
    sizes = {(row.owner, row.module): row.gib for row in why.memory}
    matrix = 4 * 256 * 512 / 2 / 2**30  # on one of two ranks
    assert sizes["parameters", "layers.*.feed_forward.w1"] == pytest.approx(6 * matrix)
    assert sizes["optimizer state", "layers.*.feed_forward.w1"] == pytest.approx(2 * 6 * matrix, rel=1e-3)
    assert {row.phase for row in why.time} >= {"forward", "recomputation", "backward", "optimizer"}
    recomputed = {row.module for row in why.time if row.phase == "recomputation" and row.kind == "matmul"}
    assert "layers.*.attention.wq" in recomputed and "output" not in recomputed
    assert sum(size for (owner, _), size in sizes.items() if owner == "parameters") <= found.memory["parameters"]


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_json_has_all_rows_and_a_run_of_stages_needs_one(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "titan_core", "estimate", "--explain", "--json", "--world-size", "64"]
    page = tmp_path / "page.html"
    settings = [word for key, value in JOB.items() for word in (f"--{key}", str(value))]
    words += ["--explain-html", str(page)]
    done = subprocess.run([*words, "llama3_debug", *settings], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert sum(row["gib"] for row in found["explanation"]["memory"]) == pytest.approx(found["peak_gib"])
    assert {*found["explanation"]["time"][0]} == {"module", "phase", "kind", "group", "seconds"}
    assert "<h1>llama3_debug on 64 x NVIDIA H100 80GB HBM3</h1>" in page.read_text(encoding="utf-8")
    done = subprocess.run([*words, "llama3_8b_stages"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--explain: explains one stage" in done.stderr and "--stage NAME" in done.stderr
