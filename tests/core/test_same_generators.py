"""What runs within ``same_generators`` leaves all random generators as they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from titan_core.toolkit.random_state import same_generators


def states() -> list[Any]:
    of_numpy = numpy.random.get_state(legacy=False)
    assert isinstance(of_numpy, dict)
    kind, twister, *normal = of_numpy.values()
    return [kind, twister["key"].tolist(), twister["pos"], *normal, random.getstate(), torch.get_rng_state().tolist()]


def draws_all() -> None:
    random.gauss(0, 1), torch.rand(1), numpy.random.rand()


CHANGES: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "all": draws_all,
    "one normal number": numpy.random.standard_normal,
    "two normal numbers": lambda: numpy.random.standard_normal(2),
    "another seed": lambda: numpy.random.seed(1),
    "the state": lambda: numpy.random.set_state(("MT19937", numpy.full(624, 7, numpy.uint32), 5, 1, 0.5)),
    "enough for new words": lambda: numpy.random.rand(1000),
}


@pytest.mark.parametrize("waiting", [False, True], ids=["", "a normal number waits"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_all_generators_are_restored(change: Callable[[], object], waiting: bool) -> None:
    numpy.random.seed(3)
    if waiting:
        numpy.random.standard_normal()
    before = states()
    for _ in range(2):
        with same_generators():
            assert states() == before
            change()
        assert states() == before


def test_drawing_between_guards_is_kept() -> None:
    numpy.random.seed(3)
    drawn = []
    for _ in range(3):
        with same_generators():
            numpy.random.standard_normal()
        drawn += numpy.random.standard_normal(1).tolist()  # in pairs, of which one waits at every second guard
    numpy.random.seed(3)
    assert drawn == numpy.random.standard_normal(3).tolist()


def test_guards_within_guards_restore_their_own_state() -> None:
    numpy.random.seed(3)
    with same_generators():
        numpy.random.standard_normal()
        before = states()
        with same_generators():
            numpy.random.standard_normal(5)
        assert states() == before
    drawn = numpy.random.rand()
    numpy.random.seed(3)
    assert numpy.random.rand() == drawn
