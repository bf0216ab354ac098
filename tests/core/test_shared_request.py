"""A request to one rank is served by all ranks at the same step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from titan_core.api import hookimpl
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, run_recipe


class Asks:
    """Makes a request on one rank, before or after ranks exchange requests in a step, and records the steps in which all
    ranks took it."""

    def __init__(self, step: int, rank: int, before: bool) -> None:
        self.step, self.rank, self.before = step, rank, before
        self.taken: list[tuple[int, str]] = []

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.mine, self.here = [run.shared_request(), run.shared_request()], run.world.rank

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self.ask(step, before=True)

    @hookimpl
    def titan_before_update(self, update: Any) -> None:
        self.taken += [(update.step, name) for name, request in zip("ab", self.mine, strict=True) if request.take()]
        self.ask(update.step, before=False)

    def ask(self, step: int, before: bool) -> None:
        if (step, self.here, before) == (self.step, self.rank, self.before):
            self.mine[1].submit()


def asked(folder: str, step: int, rank: int, before: bool) -> list[tuple[int, str]]:
    os.chdir(folder)
    asks = Asks(step, rank, before)
    assert len(run_recipe("tiny", TINY, observers=[asks]).losses) == 4
    return asks.taken


@pytest.mark.parametrize(("rank", "before", "taken"), [(0, False, 4), (1, False, 4), (1, True, 3)])
def test_all_ranks_take_a_request_once_in_the_step_after_its_exchange(
    gloo: GlooPool, tmp_path: Path, rank: int, before: bool, taken: int
) -> None:
    assert gloo.run(2, asked, str(tmp_path), 2, rank, before) == [[(taken, "b")]] * 2


class Alone:
    """Creates a request on one rank only."""

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        if run.world.rank == 1:
            run.shared_request()


class Late:
    """Creates a request after ranks have begun to exchange requests."""

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.run = run

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self.run.shared_request()


def mistaken(folder: str, observer: type[Alone | Late]) -> str:
    os.chdir(folder)
    try:
        run_recipe("tiny", TINY, observers=[observer()])
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_different_requests_are_reported(gloo: GlooPool, tmp_path: Path) -> None:
    for error in gloo.run(2, mistaken, str(tmp_path), Alone):
        assert error.startswith(
            "rank 0 has 3 shared requests and rank 1 has 4: an observer calls Run.shared_request on some"
        )
    for error in gloo.run(2, mistaken, str(tmp_path), Late):
        assert "Run.shared_request was called after titan_train_start" in error


def test_a_request_in_the_last_step_is_not_served(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(2, asked, str(tmp_path), 4, 1, False) == [[], []]
