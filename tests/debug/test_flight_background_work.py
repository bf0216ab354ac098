"""Collectives of background work, and collectives that a recorder has dropped, blame no rank."""

from __future__ import annotations

from harness.made_dumps import ASLEEP, WITH_BACKGROUND, dump, entry, verdict
from titan_debug.flight.dump import BACKGROUND


def test_background_work_does_not_block_its_rank() -> None:
    """Rank 1's background thread waits for rank 0, whose main thread waits for rank 1's main thread."""
    found = verdict(
        dump(0, [entry(1), entry(2, done=False)], groups=WITH_BACKGROUND),
        dump(1, [entry(1), entry(1, done=False, group=BACKGROUND)], groups=WITH_BACKGROUND, stack=ASLEEP),
    )
    assert (found.kind, found.culprits) == ("behind", [1])
    assert "waits for rank 0 in all_reduce #1 on background" in found.ranks[1].state


def test_a_job_that_writes_a_checkpoint_in_the_background_is_healthy() -> None:
    found = verdict(
        dump(0, [entry(1), entry(1, done=False, group=BACKGROUND)], groups=WITH_BACKGROUND, stack=ASLEEP),
        dump(1, [entry(1), entry(1, group="0")], groups=WITH_BACKGROUND, stack=ASLEEP),
    )
    assert (found.kind, found.culprits) == ("background", [])
    assert found.verdict.startswith(
        "no rank waits for another in training in step 3; in the background, rank 0 waits for rank 1 in"
    )


def test_the_label_of_background_groups_is_that_of_titan_core() -> None:
    from titan_core.api.parallel import world

    assert world.BACKGROUND == BACKGROUND


def test_a_background_wait_hides_no_wait_in_training() -> None:
    """gloo failed while rank 0 waited in collective 2."""
    found = verdict(
        dump(0, [entry(1, done=False, group=BACKGROUND), entry(1), entry(2)], groups=WITH_BACKGROUND,
             lost=True),
        dump(1, [entry(1, done=False, group=BACKGROUND), entry(1)], groups=WITH_BACKGROUND, stack=ASLEEP),
    )  # fmt: skip
    assert (found.kind, found.culprits) == ("behind", [1])
    assert "in all_reduce #2 on all ranks" in found.verdict


def test_a_rank_may_have_joined_a_collective_that_its_recorder_has_dropped() -> None:
    """In a rarely used group, rank 1 joined long ago and has recorded 2000 other collectives since."""
    found = verdict(
        dump(0, [entry(1, done=False, group="rare"), entry(9)], groups={"rare": (0, 1)}),
        dump(1, [entry(8), entry(9)], groups={"rare": (0, 1)}),
    )
    assert (found.kind, found.culprits) == ("not recorded", [])
    assert "rank 0 waits for rank 1 in all_reduce #1 on rare" in found.verdict
