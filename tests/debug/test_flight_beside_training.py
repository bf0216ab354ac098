"""Collectives beside training, and those of which a recorder has let go: they blame nobody."""

from __future__ import annotations

from harness.made_dumps import ASLEEP, BESIDE, dump, entry, raised, verdict
from titan_debug.flight.dump import BACKGROUND


def test_work_beside_training_does_not_hold_up_the_rank_that_does_it() -> None:
    """Its side thread waits for rank 0, whose main thread waits for its own."""
    found = verdict(
        dump(0, [entry(1), entry(2, done=False)], groups=BESIDE),
        dump(1, [entry(1), entry(1, done=False, group=BACKGROUND)], groups=BESIDE, stack=ASLEEP),
    )
    assert (found.kind, found.culprits) == ("behind", [1])
    assert "waits for rank 0 in all_reduce, number 1 of background" in found.ranks[1].state


def test_a_job_that_writes_a_checkpoint_beside_training_is_well() -> None:
    found = verdict(
        dump(0, [entry(1), entry(1, done=False, group=BACKGROUND)], groups=BESIDE, stack=ASLEEP),
        dump(1, [entry(1), entry(1, group="0")], groups=BESIDE, stack=ASLEEP),
    )
    assert (found.kind, found.culprits) == ("background", [])
    assert found.verdict.startswith("no rank waits for another in training in step 3; beside it rank 0 waits for rank 1 in")


def test_the_group_for_work_beside_training_is_known_by_its_name() -> None:
    from titan_core.api import world  # loads torch

    assert world.BACKGROUND == BACKGROUND


def test_what_waits_beside_training_hides_no_wait_in_it() -> None:
    """After a failure of gloo's: rank 0 waited in number 2."""
    found = verdict(
        dump(0, [entry(1, done=False, group=BACKGROUND), entry(1), entry(2)], groups=BESIDE,
             failure=raised("RuntimeError", follows=True)),
        dump(1, [entry(1, done=False, group=BACKGROUND), entry(1)], groups=BESIDE, stack=ASLEEP),
    )  # fmt: skip
    assert (found.kind, found.culprits) == ("behind", [1])
    assert "in all_reduce, number 2 of all ranks" in found.verdict


def test_a_collective_of_which_the_recorder_has_let_go_may_have_been_joined() -> None:
    """A group that is seldom used: rank 1 has joined it long ago, and 2000 others since."""
    found = verdict(
        dump(0, [entry(1, done=False, group="rare"), entry(9)], groups={"rare": (0, 1)}),
        dump(1, [entry(8), entry(9)], groups={"rare": (0, 1)}),
    )
    assert (found.kind, found.culprits) == ("not recorded", [])
    assert "rank 0 waits for rank 1 in all_reduce, number 1 of rare" in found.verdict
