"""Which errors only report that another rank is lost or late."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest

from titan_core.toolkit.errors import caused_by_peer, chain


def lose_a_peer() -> None:
    raise RuntimeError("[...pair.cc:561] Connection closed by peer [127.0.0.1]:43699")


def miss_and_lose() -> None:
    """Miss in a cache, and fail in the collective that fills it."""
    try:
        {}["key"]
    except KeyError:
        lose_a_peer()


def lose_and_fail() -> None:
    try:
        miss_and_lose()
    except RuntimeError:
        raise ValueError("cannot clean up")  # noqa: B904 - as it happens by mistake


def burn() -> None:
    try:
        raise ValueError("the disk is on fire")
    except ValueError as error:
        raise RuntimeError("Connection closed by peer") from error


def error_of(function: Callable[[], None]) -> BaseException:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        function()
    return caught.value


def test_a_handled_error_does_not_hide_a_lost_peer() -> None:
    error = error_of(miss_and_lose)
    assert caused_by_peer(error)
    assert chain(error) == [error]
    assert traceback.extract_tb(chain(error)[-1].__traceback__)[-1].name == "lose_a_peer"


def test_an_error_while_handling_a_lost_peer_follows_from_it() -> None:
    assert caused_by_peer(error_of(lose_and_fail))


def test_an_explicit_cause_counts() -> None:
    assert not caused_by_peer(error_of(burn))
