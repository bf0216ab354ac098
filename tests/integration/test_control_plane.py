"""What the control plane costs as ranks become more (benchmarks/control_plane)."""

from __future__ import annotations

import pytest

from benchmarks.control_plane.commit import checkpoint
from benchmarks.control_plane.exchange import counts, same_job, stages
from benchmarks.control_plane.gloo import all_reduces
from benchmarks.control_plane.rendezvous import peers, rendezvous
from harness.jobs import make_job
from titan_core.api.plugins.assembled_job import AssembledJob

DIGEST = 40
"""Bytes that gather_objects sends of each value."""


@pytest.fixture(scope="module")
def job() -> AssembledJob:
    return make_job("tiny", world_size=1)


def test_equal_values_cost_only_their_digests(job: AssembledJob) -> None:
    for ranks in (8, 64):
        cost = same_job(job, ranks, one_differs=False).other
        assert cost.messages == 2 * (ranks - 1)
        assert cost.num_bytes == DIGEST * cost.messages


def test_a_job_that_differs_is_sent_once(job: AssembledJob) -> None:
    few, many = (same_job(job, ranks, one_differs=True).other for ranks in (8, 64))
    digests = [2 * DIGEST * 2 * (ranks - 1) for ranks in (8, 64)]
    assert many.num_bytes - digests[1] <= few.num_bytes - digests[0]


def test_values_of_pipeline_stages_do_not_grow_with_the_ranks() -> None:
    few, many = (stages(ranks).other for ranks in (128, 512))
    assert many.num_bytes - few.num_bytes == 2 * (512 - 128) * DIGEST


def test_requests_add_no_message_to_the_counts_of_a_step() -> None:
    alone, with_requests = counts(64, 0).other, counts(64, 3).other
    assert with_requests.messages == alone.messages == 4 * 63
    assert 0 < with_requests.num_bytes - alone.num_bytes <= 3 * 8 * 4


def test_a_rank_meets_few_others() -> None:
    """Ranks but the first have as many connections as the broadcast's tree is deep, at most."""
    for ranks in (2, 7, 64, 4096):
        met = [peers(rank, ranks) for rank in range(ranks)]
        assert all(rank in met[other] for rank in range(ranks) for other in met[rank])
        assert max(map(len, met[1:])) <= 3 + ranks.bit_length()


def test_rendezvous_with_a_real_store() -> None:
    row = rendezvous(8)
    assert row.other.descriptors == 1 + len(peers(7, 8))
    assert row.first.descriptors >= 8 + 1 + len(peers(0, 8))


def test_a_checkpoint_of_many_writers() -> None:
    """On ranks but the first, only the manifest and the metadata of all chunks grow with the ranks."""
    (few, *_), small = checkpoint(4, 2)
    (many, read, loaded), large = checkpoint(16, 2)
    assert small < large < 5 * small
    assert many.other.messages - few.other.messages == 2 * 2 * (16 - 4)
    assert many.first.messages <= 12 * 16
    assert read.other.messages == 2
    assert loaded.first.num_bytes > loaded.other.num_bytes


def test_gloo_sums_on_threads() -> None:
    elapsed, cpu = all_reduces(4, rounds=3)
    assert elapsed > 0 < cpu
