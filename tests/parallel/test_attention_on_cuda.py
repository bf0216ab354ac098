"""Attention's CUDA code on fake tensors: context parallelism, document masks, and what recomputation keeps."""

from __future__ import annotations

import pytest

from harness.fake_cuda import FakeCuda

pytest.importorskip("titan_simulate")

TINY: dict[str, object] = {
    "model.args": "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}",
    "training.seq_len": 256,
    "training.local_batch_size": 1,
    "training.global_batch_size": 2,
    "data.document_mask": "false",
}
CP = "parallelism.context_parallel_degree"
RING = "parallelism.context_parallel_rotate_method"
BF16 = {"training.mixed_precision_param": "bfloat16"}
MODES = {
    "none": {},
    "full": {"activation_checkpoint.mode": "full"},
    "selective": {"activation_checkpoint.mode": "selective"},
}


def collectives(found, group: str = "mesh_cp") -> dict[tuple[str, str], int]:
    """Return how often each collective of ``group`` runs, by (operator, phase)."""
    return {(one.operator, one.phase): one.count for one in found.steps[-1].collectives if one.group == group}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_ring(fake_cuda: FakeCuda, mode: str, method: str) -> None:
    found = fake_cuda.train("tiny", {**TINY, **BF16, CP: 4, RING: method, **MODES[mode]}, 8, 1)
    print(mode, method, collectives(found))
    print([(a.operator, a.shape, a.dtype, a.count) for p in found.steps[-1].phases for a in p.peak.allocations if "mixer" in a.module])
