"""Candidates of a plan: which there are, and what is said of those that lose."""

from __future__ import annotations

import pytest

from titan_simulate.plan.candidates import divisors, factorisations
from titan_simulate.plan.search import _reason, _speed, corrected
from titan_simulate.plan.workload import STATE, Guess


@pytest.mark.parametrize("number", [1, 12, 512])
def test_factorisations_are_complete(number: int) -> None:
    found = list(factorisations(number, 3))
    expected = [(a, b, number // a // b) for a in divisors(number) for b in divisors(number // a)]
    assert found == expected
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(
    ("guess_gib", "activations", "factor", "exact", "expected"),
    [
        (100.0, 40.0, None, False, 80.0),
        (100.0, 40.0, None, True, 100.0),
        (100.0, 40.0, 1.0, False, 100.0),
        (100.0, 40.0, 1.5, True, 120.0),
        (100.0, 40.0, 0.5, False, 80.0),
    ],
)
def test_the_memory_that_estimates_correct(
    guess_gib: float, activations: float, factor: float | None, exact: bool, expected: float
) -> None:
    memory = {STATE: (guess_gib - activations) * 2**30, "activations": activations * 2**30}
    assert corrected(Guess(memory, {}), factor, exact) == pytest.approx(expected)


def test_the_reason_of_a_loser_is_where_it_takes_most_more_time() -> None:
    best = Guess({}, {"compute": 10.0, "recomputation": 2.0, "tp": 1.0})
    assert _reason(Guess({}, {"compute": 10.5, "recomputation": 2.0, "tp": 3.0}), best) == "network: tp"
    assert _reason(Guess({}, {"compute": 10.0, "recomputation": 4.0, "cp": 1.0}), best) == "recomputation"
    assert _reason(Guess({}, {"compute": 9.0, "recomputation": 2.0, "idle": 1.0}), best) == "pipeline bubble"
    assert _reason(Guess({}, {"compute": 12.0}), best) == "computation: small matmuls or an uneven pipeline"
    assert _reason(Guess({}, {"host": 2.0}), best) == "the host: small microbatches"
    assert _reason(Guess({}, {"update": 2.0}), best) == "optimizer step"


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.75, "about 25% fewer tokens/s than the best"),
        (2.0, "about 100% more tokens/s, not estimated"),  # half of the time
        (0.996, "about as fast, not estimated"),
    ],
)
def test_how_fast_a_loser_is(share: float, words: str) -> None:
    assert _speed(share) == words
