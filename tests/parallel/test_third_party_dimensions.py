"""Data parallelism covers what a third party's mesh dimension divides, by what the dimension declares."""

from __future__ import annotations

import pytest

from harness.ring import Divides, Treated, ring_job


@pytest.mark.parametrize("treated", ["shard", "replicate"])
@pytest.mark.parametrize("divides", ["batch", "sequence"])
def test_data_parallelism_covers_a_third_partys_dimension(divides: Divides, treated: Treated) -> None:
    job = ring_job(divides, treated=treated)
    assert "fsdp" in {transform.name for transform in job.transforms}
    assert job.mesh.data_dims(treated)[-1] == "ring"
