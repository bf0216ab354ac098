"""Experts on simulated ranks: what each holds, what is sent, and where the host waits."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.fake_cuda import FakeCuda

simulated = pytest.importorskip("titan_simulate.engine.result")
pytest.importorskip("titan_experts")
pytest.importorskip("titan_models_qwen3")
Owner = simulated.Owner

P = "parallelism."
DIM, HIDDEN, LAYERS, DENSE, EXPERTS, PER_TOKEN, SEQ, BATCH = 64, 32, 3, 1, 32, 4, 128, 2
SPARSE = LAYERS - DENSE
MODEL_OF = (
    f"{{{{dim = {DIM}, n_layers = {LAYERS}, n_dense_layers = {DENSE}, n_heads = 2, n_kv_heads = 1, "
    f"head_dim = 32, ffn_dim = 64, expert_dim = {{}}, n_experts = {EXPERTS}, experts_per_token = {PER_TOKEN}}}}}"
)
MODEL = MODEL_OF.format(HIDDEN)
JOB: dict[str, object] = {
    "model.args": MODEL,
    "training.seq_len": SEQ,
    "training.local_batch_size": BATCH,
    "training.global_batch_size": -1,
    "training.steps": 3,
    "metrics.log_freq": 100,
    "training.mixed_precision_param": "bfloat16",
    "compile.enable": "false",
    P + "fsdp_group_mib": 0.0,
}
ROWS = BATCH * SEQ * PER_TOKEN


@pytest.mark.parametrize("dispatch", ["alltoall", "device"])
def test_the_host_waits_once_in_each_layer_with_experts_or_never(fake_cuda: FakeCuda, dispatch: str) -> None:
    job = {**JOB, P + "expert_parallel_degree": 8, P + "expert_parallel_dispatch": dispatch}
    found = fake_cuda.train("qwen3_moe_tiny", job, world_size=64, rank=9, strict=dispatch == "device")
    waits = Counter(wait.where.partition(":")[0] for wait in found.steps[1].waits)  # of a step that is not logged
    assert waits == ({} if dispatch == "device" else {"titan_experts/dispatch.py": SPARSE})


def test_each_row_is_sent_to_its_expert_and_back(fake_cuda: FakeCuda) -> None:
    job = {**JOB, P + "expert_parallel_degree": 8}
    found = fake_cuda.train("qwen3_moe_tiny", job, world_size=64, rank=9, strict=False)
    sent = sum(one.bytes for one in found.steps[1].collectives if one.group == "mesh_ep" and one.phase == "forward")
    counts = 8 * EXPERTS
    assert sent == SPARSE * (2 * ROWS * DIM * 2 + counts)


@pytest.mark.parametrize("dispatch", ["none", "alltoall", "device"])
def test_operations_of_experts_are_those_of_the_rows_that_there_are(fake_cuda: FakeCuda, dispatch: str) -> None:
    """They were none, and those of empty places in buffers of a fixed size count no more."""
    experts = {} if dispatch == "none" else {P + "expert_parallel_degree": 8, P + "expert_parallel_dispatch": dispatch}
    narrow, wide = (
        fake_cuda.train("qwen3_moe_tiny", {**JOB, **experts, "model.args": MODEL_OF.format(hidden)}, 64, strict=False)
        for hidden in (HIDDEN, 2 * HIDDEN)
    )
    more = {name: wide.steps[1].phase(name).flops - narrow.steps[1].phase(name).flops for name in ("forward", "backward")}
    forward = SPARSE * 3 * 2 * ROWS * DIM * HIDDEN
    assert more == {"forward": forward, "backward": 2 * forward}


def test_each_rank_holds_an_even_share_of_the_experts(fake_cuda: FakeCuda) -> None:
    """Each group of 16 ranks divides 32 experts, and 4 ranks their two: half of the ranks held twice as much, the others
    nothing."""
    job = {**JOB, P + "expert_parallel_degree": 16}
    ranks = [fake_cuda.train("qwen3_moe_tiny", job, 64, rank, strict=False) for rank in (0, 63)]
    dense = LAYERS * (2 * DIM * 64 + 2 * DIM * 32 + 2 * DIM + 2 * 32) + DENSE * 3 * DIM * 64 + SPARSE * DIM * EXPERTS
    whole = dense + 2 * 288 * DIM + DIM + SPARSE * EXPERTS * 3 * DIM * HIDDEN
    assert [found.resident[Owner.PARAMETERS] for found in ranks] == pytest.approx([4 * whole / 64] * 2, rel=1e-3)
