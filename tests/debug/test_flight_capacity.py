"""The number of collectives that the Flight Recorder keeps."""

from __future__ import annotations

from dataclasses import replace

from titan_core.api import BatchPlan, Job, MeshPlan
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_debug.flight.collect import LEAST, MOST, STEPS, capacity
from titan_testing.jobs import make_job


def facts(blocks: int, microbatches: int = 1, local_size: int = 1, **degrees: int) -> Job:
    job = make_job("tiny")
    mesh = MeshPlan(STANDARD_DIMS, {dim.name: degrees.get(dim.name, 1) for dim in STANDARD_DIMS})
    model = replace(job.model, layout=replace(job.model.layout, num_blocks=blocks))
    batch = BatchPlan(1, local_size, microbatches, 1, 1, 128)
    return replace(job, mesh=mesh, model=model, batch=batch)


def test_a_small_job_keeps_as_many_as_before() -> None:
    assert capacity(facts(6)) == capacity(facts(6, dp_shard=2)) == LEAST == 2000


def test_it_grows_with_what_a_step_communicates() -> None:
    sizes = [
        capacity(facts(32, 16, dp_shard=8)),
        capacity(facts(80, 16, dp_shard=8)),
        capacity(facts(80, 32, dp_shard=8)),
        capacity(facts(80, 32, dp_shard=8, tp=8)),
    ]
    assert sizes == sorted(sizes) and len(set(sizes)) == 4
    assert sizes[0] == STEPS * (20 + 16 * 3 * 34)
    assert sizes[-1] == MOST


def test_a_stage_keeps_those_of_its_own_blocks() -> None:
    one, four = (capacity(facts(96, 8, dp_shard=8, pp=stages)) for stages in (1, 4))
    assert LEAST < four < one / 2
