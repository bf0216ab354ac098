"""What the control plane costs as ranks become more (benchmarks/control_plane)."""

from __future__ import annotations

import pytest

from benchmarks.control_plane.commit import checkpoint
from benchmarks.control_plane.exchange import counts, same_job, stages
from benchmarks.control_plane.gloo import all_reduces
from benchmarks.control_plane.rendezvous import peers, rendezvous
from benchmarks.control_plane.start import report
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_testing.jobs import make_job

FRAME = 512
"""Bytes of a message with a digest."""


@pytest.fixture(scope="module")
def job() -> AssembledJob:
    return make_job("tiny", world_size=1)


@pytest.mark.parametrize(("ranks", "depth"), [(8, 3), (64, 6), (131_072, 17)])
def test_equal_values_cost_a_digest_each_way(job: AssembledJob, ranks: int, depth: int) -> None:
    row = same_job(job, ranks, one_differs=False)
    assert (row.first.messages, row.other.messages) == (2 * depth, 2)
    assert row.first.num_bytes == FRAME * 2 * depth


def test_a_job_that_differs_does_not_cost_more_with_more_ranks(job: AssembledJob) -> None:
    few, many = (same_job(job, ranks, one_differs=True).first for ranks in (8, 512))
    assert many.messages == 3 * few.messages  # the tree is 9 and 3 deep
    assert many.num_bytes < 4 * few.num_bytes


def test_values_of_pipeline_stages_grow_with_the_rounds_alone() -> None:
    few, many = (stages(ranks).first for ranks in (128, 16_384))
    assert many.messages - few.messages <= 2 * 3 * 10
    assert many.num_bytes < 3 * few.num_bytes


def test_sums_agree_where_the_ranks_are_no_power_of_two() -> None:
    """``counts`` asserts the total itself."""
    for ranks in (2, 33, 48, 100, 131_000):
        assert counts(ranks, 1).first.messages <= max(4 * 31, 2 * ranks.bit_length())


def test_requests_add_no_message_to_the_counts_of_a_step() -> None:
    alone, with_requests = counts(64, 0).first, counts(64, 3).first
    assert with_requests.messages == alone.messages == 2 * 6
    assert with_requests.num_bytes - alone.num_bytes == 2 * 6 * 3 * 8


def test_a_rank_meets_few_others() -> None:
    """A rank has as many connections as the tree is deep, and those of a ring."""
    for ranks in (2, 7, 64, 4096):
        met = [peers(rank, ranks) for rank in range(ranks)]
        assert all(rank in met[other] for rank in range(ranks) for other in met[rank])
        assert max(map(len, met)) <= 3 + ranks.bit_length()


def test_rendezvous_with_a_real_store() -> None:
    row = rendezvous(8)
    assert row.other.descriptors == 1 + len(peers(7, 8))
    assert row.first.descriptors >= 8 + 1 + len(peers(0, 8))


def test_a_checkpoint_of_many_writers() -> None:
    """On ranks but the first, only the manifest grows with the ranks."""
    (few, *_), small = checkpoint(4, 2)
    (many, read, loaded), large = checkpoint(16, 2)
    assert small < large < 5 * small
    assert many.other.messages == few.other.messages  # those of its parent
    assert many.first.messages <= 8 * 4  # at most two messages each way of each child, then the checksums and the outcome
    assert read.other.messages == 2
    assert loaded.first.messages == loaded.other.messages == 0


def test_gloo_sums_on_threads() -> None:
    for over_tree in (False, True):  # raises if a sum is wrong
        elapsed, cpu = all_reduces(5, rounds=3, over_tree=over_tree)
        assert elapsed > 0 < cpu


def test_the_start_of_rank_0_is_measured_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    report(4096)
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(": ")[2].partition(" s of CPU")[0].rpartition(" ")[0] for line in lines] == [
        "4096 ranks: a gloo group of all ranks:",
        "4096 ranks: the mesh of FSDP x TP 8:",
    ]
    assert all(int(line.split()[-2]) < 200 for line in lines)  # MiB
