"""The trainer and the observers of a run never make the host wait for the device, except in logged steps."""

from __future__ import annotations

import pytest

from harness.fake_cuda import FakeCuda
from harness.quick import rows

STEPS = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}",
    "training.seq_len": 32,
    "training.steps": 4,
    "metrics.log_freq": 100,
}
"""The second and third step are not logged."""

JOBS: dict[str, tuple[int, dict[str, object]]] = {
    "one device": (1, {}),
    "shards": (4, {"training.on_nan": "skip", "numerics.spike_action": "skip"}),
    "replicas of shards": (4, {"parallelism.data_parallel_replicate_degree": 2, "optimizer.name": "Adam"}),
}


@pytest.mark.parametrize("job", rows(JOBS, ["shards"]))
def test_no_step_waits(fake_cuda: FakeCuda, job: str) -> None:
    ranks, settings = JOBS[job]
    found = fake_cuda.train("tiny", {**STEPS, **settings}, world_size=ranks)
    assert [wait for step in found.steps[1:3] for wait in step.waits] == []


def test_an_update_that_the_host_has_to_guard_waits(fake_cuda: FakeCuda) -> None:
    """Fused Adam decides on the device; the other implementations cannot."""
    found = fake_cuda.train("tiny", {**STEPS, "optimizer.implementation": "foreach"}, strict=False)
    assert any("optimizer_step.py" in wait.where and "reading a value" in wait.what for wait in found.steps[1].waits)
