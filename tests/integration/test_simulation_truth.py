"""A simulation predicts the memory that real jobs allocate on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.fake_cuda import FakeCuda
from harness.measured_memory import Measured, measured_rank, simulated_rank
from harness.third_party import install
from titan_testing.gloo_pool import GlooPool

simulated = pytest.importorskip("titan_simulate.engine.result")
Owner = simulated.Owner

P = "parallelism."
LLAMA: dict[str, object] = {
    "model.args": "{dim = 64, n_layers = 4, n_heads = 8, n_kv_heads = 8, ffn_dim = 128}",
    "training.seq_len": 256,
    "training.local_batch_size": 4,
    "training.global_batch_size": -1,
}
TP, PP = {P + "tensor_parallel_degree": 2}, {P + "pipeline_parallel_degree": 2}


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, {}, id="one device"),
        pytest.param(1, {"activation_checkpoint.mode": "full"}, id="full recomputation"),
        pytest.param(1, {"activation_checkpoint.mode": "selective"}, id="selective recomputation"),
        pytest.param(1, {"training.global_batch_size": 8}, id="accumulation"),
        pytest.param(4, {}, id="FSDP 4"),
        pytest.param(4, {P + "data_parallel_replicate_degree": 2}, id="HSDP 2 x 2", marks=pytest.mark.full),
        pytest.param(
            2,
            {P + "data_parallel_replicate_degree": 2, P + "data_parallel_shard_degree": 1},
            id="DDP 2",
            marks=pytest.mark.full,
        ),
        pytest.param(4, TP, id="TP 2 x FSDP 2", marks=pytest.mark.full),
        pytest.param(2, {"training.freeze": '["tok_embeddings.*"]'}, id="FSDP 2, frozen"),
        pytest.param(4, {"optimizer.name": "Muon"}, id="FSDP 4, Muon", marks=pytest.mark.full),
        pytest.param(2, {"optimizer.name": "AdamWBF16"}, id="FSDP 2, AdamWBF16", marks=pytest.mark.full),
        pytest.param(2, TP, id="TP 2"),
        pytest.param(2, {**PP, P + "pipeline_parallel_schedule": "1F1B"}, id="PP 2"),
        pytest.param(2, {**PP, P + "pipeline_parallel_schedule": "Interleaved1F1B"}, id="PP 2, interleaved"),
    ],
)
def test_a_simulated_rank_needs_what_a_real_one_allocates(
    fake_cuda: FakeCuda, gloo: GlooPool, tmp_path: Path, ranks: int, overrides: dict[str, object]
) -> None:
    settings = {**LLAMA, **overrides}
    for rank, real in enumerate(gloo.run(ranks, measured_rank, "", "llama3_debug", settings, str(tmp_path))):
        found = predicted(fake_cuda.call(simulated_rank, "", "llama3_debug", settings, ranks, rank))
        assert replace(found, step=0) == replace(real, step=0)
        assert found.step == pytest.approx(real.step, rel=0.1)


def test_a_simulated_rank_holds_the_experts_that_a_real_one_does(
    fake_cuda: FakeCuda, gloo: GlooPool, tmp_path: Path
) -> None:
    site = str(tmp_path / "site")
    install(tmp_path / "site", "titan-model-moe")
    settings = {
        "model.args": "{dim = 32, expert_dim = 24}", "training.seq_len": 32, "training.local_batch_size": 2,
        "training.global_batch_size": -1, P + "expert_parallel_degree": 2,
    }  # fmt: skip
    for rank, real in enumerate(gloo.run(2, measured_rank, site, "moe", settings, str(tmp_path))):
        found = predicted(fake_cuda.call(simulated_rank, site, "moe", settings, 2, rank))
        assert replace(found, step=0) == replace(real, step=0)


def predicted(found: simulated.SimulatedRank) -> Measured:  # type: ignore[name-defined]
    """Return what a simulation predicts of the same step."""
    first, second = found.steps
    return Measured(
        parameters=found.resident[Owner.PARAMETERS],
        gradients=first.phase("norm").peak.owners[Owner.GRADIENTS],
        optimizer=found.resident[Owner.OPTIMIZER],
        step=max(second.phase(name).peak.bytes for name in ("forward", "backward")) - first.phases[-1].live,
    )
