"""Which failures the launcher retries, how often, and after which waits."""

from __future__ import annotations

import signal

import pytest

from titan_core.toolkit import errors
from titan_launch.restart.policy import RestartLimits, RestartPolicy, patience


@pytest.mark.parametrize(
    ("status", "restarts"),
    [
        (errors.EXIT_FAILURE, True),
        (errors.EXIT_USER_ERROR, False),
        (errors.EXIT_NUMERICS, False),
        (errors.EXIT_DATA_ENDED, False),
        (errors.EXIT_LOST_PEER, True),
        (errors.EXIT_HARDWARE, True),
        (errors.EXIT_BAD_DEVICE, False),
        (errors.EXIT_PREEMPTED, True),
        (errors.EXIT_INTERRUPTED, False),
        (128 + signal.SIGKILL, True),
        (128 + signal.SIGSEGV, True),
    ],
)
def test_only_failures_that_may_not_come_back_are_retried(status: int, restarts: bool) -> None:
    decision = RestartPolicy(RestartLimits(3)).after(status, begun=0, completed=5)
    assert decision.restarts == restarts
    assert bool(decision.why) != restarts


@pytest.mark.parametrize(("completed", "restarts"), [(10, False), (11, True)])
def test_a_lack_of_memory_is_retried_unless_it_came_in_the_first_step(completed: int, restarts: bool) -> None:
    policy = RestartPolicy(RestartLimits(3))
    assert policy.after(errors.EXIT_OUT_OF_MEMORY, begun=10, completed=completed).restarts == restarts


def test_waits_double_and_end() -> None:
    policy = RestartPolicy(RestartLimits(6, wait=5.0, longest_wait=30.0))
    decisions = [policy.after(1, begun=0, completed=7) for _ in range(7)]
    assert [one.wait for one in decisions[:6]] == [0.0, 5.0, 10.0, 20.0, 30.0, 30.0]
    assert [one.left for one in decisions[:6]] == [5, 4, 3, 2, 1, 0]
    assert [one.restarts for one in decisions] == [True] * 6 + [False]


def test_an_attempt_that_gets_further_clears_the_count() -> None:
    policy = RestartPolicy(RestartLimits(2))
    first = [policy.after(137, begun=0, completed=step) for step in (10, 10, 20, 20, 30, 40, 50)]
    assert all(one.restarts for one in first)
    assert [one.wait for one in first] == [0.0, 5.0, 0.0, 5.0, 0.0, 0.0, 0.0]
    # Not further than before: also not when it is unknown how far the attempt got.
    assert [policy.after(137, begun=50, completed=step).restarts for step in (50, 0, 50)] == [True, False, False]


def test_without_restarts_nothing_is_explained() -> None:
    assert RestartPolicy(RestartLimits(0)).after(errors.EXIT_USER_ERROR, 0, 0).why == ""


@pytest.mark.parametrize(
    ("ended", "recorded", "seconds"),
    [
        ([75], False, 120.0),
        ([66, 0], False, 120.0),
        ([1], True, 10.0),
        ([69], True, 10.0),
        ([-signal.SIGKILL], False, 3.0),
        ([-signal.SIGKILL, 69], True, 1.0),
        ([-signal.SIGABRT, 69], True, 10.0),
    ],
)
def test_ranks_that_only_wait_for_a_killed_one_get_less_time(ended: list[int], recorded: bool, seconds: float) -> None:
    assert patience(ended, recorded, grace=120.0) == seconds
