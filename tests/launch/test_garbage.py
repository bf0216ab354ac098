"""Garbage collection in training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from titan_core.api import hookimpl
from titan_testing.jobs import TINY, run_recipe


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self, freed: list[int], step: int) -> None:
        self._freed, self._step = freed, step
        self._self = self

    def __del__(self) -> None:
        self._freed.append(self._step)


class Litter:
    """An observer that leaves a cycle in every step, and records after which step each is freed."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.freed_by: dict[int, list[int]] = {}
        self.automatic: list[bool] = []
        self.frozen: list[int] = []

    @hookimpl(trylast=True)
    def titan_train_start(self) -> None:
        gc.unfreeze()  # the recorder of the tests freezes

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self.freed_by[step - 1] = list(self.freed)
        self.automatic.append(gc.isenabled())
        self.frozen.append(gc.get_freeze_count())
        Cycle(self.freed, step)


pytestmark = pytest.mark.usefixtures("in_tmp")


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    assert gc.isenabled() and gc.get_freeze_count() == 0
    yield
    assert gc.isenabled() and gc.get_freeze_count() == 0


def litter(**settings: Any) -> Litter:
    observer = Litter()
    run_recipe("tiny", {**TINY, "training.steps": 8, **settings}, observers=[observer])
    return observer


@pytest.mark.full
def test_all_ranks_collect_at_the_same_steps() -> None:
    found = litter(**{"training.gc_freq": 3})
    # After the first step, and after every third one.
    assert found.freed_by == {
        0: [],
        1: [1],
        2: [1],
        3: [1, 2, 3],
        4: [1, 2, 3],
        5: [1, 2, 3],
        6: [1, 2, 3, 4, 5, 6],
        7: [*range(1, 7)],
    }
    assert found.automatic == [False] * 8
    assert found.frozen[0] == 0
    assert found.frozen[1] >= found.frozen[-1] > 10_000  # nothing is added; reference counts still free some


def test_zero_leaves_collections_to_python() -> None:
    found = litter(**{"training.gc_freq": 0})
    assert found.automatic == [True] * 8
    assert found.frozen == [0] * 8


def test_python_collects_again_after_an_error() -> None:
    class Failing:
        @hookimpl
        def titan_step_start(self, step: int) -> None:
            if step == 3:
                assert not gc.isenabled()
                raise KeyError("step 3")

    with pytest.raises(Exception, match="step 3"):
        run_recipe("tiny", TINY, observers=[Failing()])
