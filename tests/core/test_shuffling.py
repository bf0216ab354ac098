"""Document orders depend only on seed and epoch, and dataset mixtures only on seed and sequence number."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy
import pytest

from harness.letters import Letters, letters
from harness.loaders import LENGTHS
from harness.oracle import shuffled
from titan_core.api import ShuffledDocuments
from titan_core.data.buffered_shuffle import BufferedShuffle, ShuffledStream
from titan_core.data.shards import Mixture


def test_every_batch_is_mixed_evenly() -> None:
    mixture = Mixture([0.7, 0.2, 0.1], seed=3)
    for step in range(50):
        counts = [0, 0, 0]
        for place in range(64):
            counts[mixture.dataset_of(step * 64 + place)] += 1
        assert all(abs(count - 64 * share) < 3 for count, share in zip(counts, (0.7, 0.2, 0.1), strict=True))


def test_a_shuffle_buffer_is_restored_exactly() -> None:
    spec = letters("stream:" + LENGTHS)
    source = ShuffledStream(spec.build.load()(spec.context), 7, seed=5)
    whole = list(source.shard(1, 3, 0))
    assert whole != list(source._source.shard(1, 3, 0))
    assert whole != list(source.shard(1, 3, 1))
    for done in range(len(whole) + 1):
        first = source.shard(1, 3, 0)
        assert list(itertools.islice(first, done)) == whole[:done]
        second = source.shard(1, 3, 0)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        third = source.shard(1, 3, 0)
        third.load_state_dict(second.state_dict())  # saved again before anything was read
        assert list(second) == whole[done:]
        assert list(third) == whole[done:]


def test_a_blocks_order_depends_on_its_number() -> None:
    got = [int(text) for text in BufferedShuffle(Plain(6), 4, (7, 1))]  # type: ignore[call-overload]
    orders = [numpy.random.default_rng([7, 1, block]).permutation(size) for block, size in ((0, 4), (1, 2))]
    assert got == [*orders[0].tolist(), *(4 + orders[1]).tolist()]


def test_a_mixture_depends_only_on_seed_and_sequence_number() -> None:
    first, same, other = (Mixture([1.0, 1.0], seed=seed) for seed in (3, 3, 4))
    numbers = range(1000)
    assert [first.dataset_of(number) for number in numbers] == [same.dataset_of(number) for number in reversed(numbers)][
        ::-1
    ]
    assert [first.dataset_of(number) for number in numbers] != [other.dataset_of(number) for number in numbers]
    assert {Mixture([0.0, 2.0, 0.0], 0).dataset_of(number) for number in numbers} == {1}
    # Weights need not sum to 1, and each dataset has its own share, not its neighbour's.
    counts = Counter(Mixture([10.0, 30.0, 60.0], 5).dataset_of(number) for number in numbers)
    assert [counts[dataset] / 1000 for dataset in range(3)] == pytest.approx([0.1, 0.3, 0.6], abs=0.005)


class Plain:
    """Documents in their original order."""

    def __init__(self, number: int) -> None:
        self.documents, self.next = [str(document) for document in range(number)], 0

    def __iter__(self) -> Plain:
        return self

    def __next__(self) -> str:
        if self.next == len(self.documents):
            raise StopIteration
        self.next += 1
        return self.documents[self.next - 1]

    def state_dict(self) -> Any:
        return {"next": self.next}

    def load_state_dict(self, state: Any) -> None:
        self.next = state["next"]


def test_blocks_of_a_buffer_have_different_orders() -> None:
    read = list(BufferedShuffle(Plain(24), 8, (0, 1)))
    blocks = [read[start : start + 8] for start in (0, 8, 16)]
    assert [sorted(map(int, block)) for block in blocks] == [list(range(start, start + 8)) for start in (0, 8, 16)]
    orders = {tuple(int(document) - start for document in block) for start, block in zip((0, 8, 16), blocks, strict=True)}
    assert len(orders) == 3
    assert tuple(range(8)) not in orders
    assert list(BufferedShuffle(Plain(24), 8, (0, 1))) == read
    assert list(BufferedShuffle(Plain(24), 8, (0, 2))) != read


def test_document_order_depends_on_seed_and_epoch() -> None:
    source = Letters([str(length) for length in range(1, 9)], 33)

    def order(seed: int, epoch: int) -> list[str]:
        documents = ShuffledDocuments(source, seed)
        dealt = [list(documents.shard(index, 2, epoch)) for index in range(2)]
        assert sorted(map(len, (*dealt[0], *dealt[1]))) == list(range(1, 9))
        return [document for pair in zip(*dealt, strict=True) for document in pair]  # type: ignore[misc]

    assert len({tuple(order(seed, epoch)) for seed in range(2) for epoch in range(3)}) == 6
    assert order(1, 2) == [source.text(index) for index in shuffled(8, 1, 2)]
