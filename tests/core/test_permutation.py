"""Computed orders: each element once, in both directions, without structure, and at the same cost for any size."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from typing import Any

import numpy
import pytest

from harness.oracle import shuffled
from titan_core.api import ShuffledDocuments
from titan_core.api.data.permutation import Permutation

FULL = pytest.mark.full
AROUND_POWERS = sorted({2**power + more for power in range(1, 20) for more in range(-6, 6) if 2**power + more > 0})[:200]


def order(size: int, *key: int) -> Any:
    return Permutation(size, key)(numpy.arange(size))


def test_each_element_once_for_200_sizes_around_powers_of_two() -> None:
    assert len(AROUND_POWERS) == 200
    for size in AROUND_POWERS:
        permutation = Permutation(size, (size, 0))
        elements = permutation(numpy.arange(size))
        assert numpy.array_equal(numpy.sort(elements), numpy.arange(size)), size
        assert numpy.array_equal(permutation.inverse(elements), numpy.arange(size)), size


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 37, 4095, 4096, 4097, 5000])
def test_it_equals_an_implementation_with_pythons_numbers(size: int) -> None:
    assert order(size, 3, 7).tolist() == shuffled(size, 3, 7)


@pytest.mark.parametrize("size", [10**10, 2**40 + 1, 2**62])
def test_large_sizes_are_inverted(size: int) -> None:
    permutation = Permutation(size, (1,))
    positions = numpy.append(numpy.arange(3000) * (size // 3000), size - 1)
    elements = permutation(positions)
    assert len(numpy.unique(elements)) == len(positions)
    assert elements.min() >= 0 and elements.max() < size
    assert numpy.array_equal(permutation.inverse(elements), positions)


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="cannot permute"):
        Permutation(size, (1,))
    with pytest.raises(ValueError, match="5 is not below 5"):
        Permutation(5, (1,))(numpy.array([0, 5]))


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=FULL), pytest.param(5, marks=FULL)])
def test_all_orders_of_a_few_elements_are_equally_frequent(size: int) -> None:
    number = 50 * math.factorial(size)
    counts = Counter(tuple(order(size, seed, 0).tolist()) for seed in range(number))
    assert chi_square([counts[one] for one in itertools.permutations(range(size))]) < 4


@pytest.mark.parametrize("size", [100, *(pytest.param(size, marks=FULL) for size in (1000, 5003, 2**16))])
def test_positions_are_uniform(size: int) -> None:
    """For fixed elements, over seeds and over epochs; and for neighbours: their distance is that of two random elements."""
    buckets, number = 20, 1000
    some = numpy.array([0, 1, size // 3, size // 2, size - 1])
    for keys in ([(seed, 0) for seed in range(number)], [(5, epoch) for epoch in range(number)]):
        found = numpy.array([Permutation(size, key)(some) for key in keys])
        for places in found.T:
            assert chi_square(numpy.bincount(places * buckets // size, minlength=buckets)) < 4.5
        steps = (found[:, 1] - found[:, 0]) % size
        assert chi_square(numpy.bincount((steps - 1) * buckets // (size - 1), minlength=buckets)) < 4.5


def test_one_order_is_uniform() -> None:
    """Elements at successive positions are in independent parts of the range, of 1e10 too."""
    for size in (20_000, 2**17, 10**10):
        elements = Permutation(size, (11, 3))(numpy.arange(20_000))
        places = elements * 16 // size
        assert abs(chi_square(numpy.bincount(places, minlength=16))) < (4.5 if size > 20_000 else 99)
        assert chi_square(numpy.bincount(places[:-1] * 16 + places[1:], minlength=256)) < 4.5
        assert abs(numpy.corrcoef(elements, numpy.arange(len(elements)))[0, 1]) < 0.04


def test_epochs_and_seeds_share_no_structure() -> None:
    """An element keeps its place, or its neighbour, as often as by chance: once in an order on average."""
    size = 4099
    orders = {(seed, epoch): order(size, seed, epoch) for seed in range(6) for epoch in range(6)}
    kept, followed = [], []
    for first, second in itertools.combinations(orders.values(), 2):
        kept.append(int((first == second).sum()))
        next_of = numpy.empty(size, numpy.int64)
        next_of[first[:-1]] = first[1:]
        next_of[first[-1]] = -1
        followed.append(int((next_of[second[:-1]] == second[1:]).sum()))
    for counts in (kept, followed):
        assert numpy.mean(counts) == pytest.approx(1, abs=5 / math.sqrt(len(counts)))
        assert max(counts) <= 9
    fixed = [int((one == numpy.arange(size)).sum()) for one in orders.values()]
    assert numpy.mean(fixed) == pytest.approx(1, abs=5 / math.sqrt(len(fixed)))


def test_a_source_of_ten_thousand_million_documents_is_read_at_once() -> None:
    """Its shards, and a position in the middle, cost no more than those of a thousand."""

    class Numbers:
        def __init__(self, size: int) -> None:
            self.size = size

        def __len__(self) -> int:
            return self.size

        def text(self, index: int) -> str:
            return str(index)

    def seconds(size: int) -> float:
        started = time.process_time()
        shards = [ShuffledDocuments(Numbers(size), 3).shard(index, 8, 1) for index in range(8)]
        for shard in shards:
            shard.load_state_dict({"next": size // 16})
            assert len({next(shard) for _ in range(20)}) == 20
        return time.process_time() - started

    seconds(1000)
    assert seconds(10**10) < seconds(1000) + 0.5  # a stored order of 1e10 takes 80 GB and minutes


def chi_square(counts: Any) -> float:
    """Return the chi-square statistic of equal frequencies, in standard deviations from its mean."""
    counts = numpy.asarray(counts, float)
    expected, degrees = counts.mean(), len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))
