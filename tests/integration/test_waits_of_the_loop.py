"""The trainer and the observers of a run never make the host wait for the device, except in logged steps."""

from __future__ import annotations

import pytest

from harness.fake_cuda import FakeCuda

STEPS = {"training.steps": 4, "metrics.log_freq": 100}
"""The second and third step are not logged."""

GUARDS: dict[str, dict[str, object]] = {
    "as it comes": {},
    "skip bad updates": {"training.on_nan": "skip", "numerics.spike_action": "skip"},
    "replicas and shards": {"parallelism.data_parallel_replicate_degree": 2},
}


@pytest.mark.parametrize("settings", GUARDS.values(), ids=GUARDS.keys())
@pytest.mark.parametrize("ranks", [1, 4])
def test_no_step_waits(fake_cuda: FakeCuda, settings: dict[str, object], ranks: int) -> None:
    if ranks == 1 and "parallelism.data_parallel_replicate_degree" in settings:
        settings = {"optimizer.name": "Adam"}
    found = fake_cuda.train("tiny", {**STEPS, **settings}, world_size=ranks)
    assert [wait for step in found.steps[1:3] for wait in step.waits] == []


def test_an_update_that_is_guarded_on_the_host_waits(fake_cuda: FakeCuda) -> None:
    """Fused Adam decides on the device; the other implementations cannot."""
    settings = {**STEPS, "optimizer.implementation": "foreach"}
    found = fake_cuda.train("tiny", settings, strict=False)
    (wait,) = found.steps[1].waits
    assert "trainer.py" in wait.where
