"""What decides a stream of data, part by part."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy
import pytest

from harness.letters import BYTE, Letters, letters, open_letters, stream
from titan_core.data.buffered_shuffle import BufferedShuffle
from titan_core.data.loader import DataLoader
from titan_core.data.mixture import Mixture
from titan_core.data.reading import DocumentReader, ReadPolicy
from titan_core.data.shuffled import ShuffledDocuments
from titan_core.data.stream_spec import StreamSpec
from titan_core.errors import UserError
from titan_core.job.batch_plan import BatchPlan

PLAN = BatchPlan(global_size=4, local_size=2, microbatches=2, ranks=1, logical_shards=2, seq_len=5)
SPEC = stream(letters("3,5,7,2,9,4,8,6"), letters("2,2,2,2", name="b", weight=0.5), plan=PLAN)


def loader(spec: StreamSpec) -> DataLoader:
    return DataLoader(spec, [open_letters(one.request) for one in spec.datasets], BYTE, rank=0)


def changed_request(**changes: Any) -> StreamSpec:
    first = SPEC.datasets[0]
    return replace(SPEC, datasets=(replace(first, request=replace(first.request, **changes)), SPEC.datasets[1]))


CHANGES: dict[str, StreamSpec] = {
    "training.seed": replace(SPEC, seed=1),
    "data.shuffle_buffer": replace(SPEC, shuffle_buffer=8),
    "data.logical_shards": replace(SPEC, plan=replace(PLAN, logical_shards=4)),
    "weight": replace(SPEC, datasets=(SPEC.datasets[0], replace(SPEC.datasets[1], weight=0.7))),
    "order of datasets": replace(SPEC, datasets=(SPEC.datasets[1], SPEC.datasets[0])),
    "one dataset less": replace(SPEC, datasets=SPEC.datasets[:1]),
    "path": changed_request(path="3,5,7,2,9,4,8,7"),
    "number of documents": changed_request(path="3,5,7,2,9,4,8"),
    "field": changed_request(text_field="body"),
    "format": changed_request(format="a:b"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_position_in_another_stream_is_refused(change: str) -> None:
    saved = loader(SPEC).state_dict()
    loader(SPEC).load_state_dict(saved)
    with pytest.raises(UserError, match="position"):
        loader(CHANGES[change]).load_state_dict(saved)


class Plain:
    """Documents in their own order."""

    def __init__(self, number: int) -> None:
        self.documents, self.next = [str(one) for one in range(number)], 0

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


def test_blocks_of_a_buffer_have_orders_of_their_own() -> None:
    read = list(BufferedShuffle(Plain(24), 8, (0, 1)))
    blocks = [read[start : start + 8] for start in (0, 8, 16)]
    assert [sorted(map(int, block)) for block in blocks] == [list(range(start, start + 8)) for start in (0, 8, 16)]
    orders = {tuple(int(one) - start for one in block) for start, block in zip((0, 8, 16), blocks, strict=True)}
    assert len(orders) == 3
    assert tuple(range(8)) not in orders
    assert list(BufferedShuffle(Plain(24), 8, (0, 1))) == read
    assert list(BufferedShuffle(Plain(24), 8, (0, 2))) != read


def test_the_order_of_documents_is_that_of_seed_and_epoch() -> None:
    source = Letters([str(one) for one in range(1, 9)], 33)

    def order(seed: int, epoch: int) -> list[str]:
        documents = ShuffledDocuments(source, seed)
        dealt = [list(documents.shard(index, 2, epoch)) for index in range(2)]
        assert sorted(map(len, (*dealt[0], *dealt[1]))) == list(range(1, 9))
        return [one for pair in zip(*dealt, strict=True) for one in pair]  # type: ignore[misc]

    assert len({tuple(order(seed, epoch)) for seed in range(2) for epoch in range(3)}) == 6
    expected = numpy.random.Generator(numpy.random.Philox(key=[1, 2])).permutation(8)
    assert order(1, 2) == [source.text(index) for index in expected]


def test_a_mixture_is_a_function_of_its_seed_and_keeps_its_shares() -> None:
    def chosen(seed: int) -> list[int]:
        return [Mixture([3.0, 0.0, 1.0], seed).dataset_of(number) for number in range(64)]

    assert len({tuple(chosen(seed)) for seed in range(8)}) == 8
    assert [chosen(0).count(dataset) for dataset in range(3)] == [48, 0, 16]


class Broken:
    """Fails so many times before each document."""

    def __init__(self, times: int) -> None:
        self.times, self.failed = times, 0

    def __next__(self) -> str:
        if self.failed < self.times:
            self.failed += 1
            raise OSError("the network is away")
        return "text"

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(("times", "waits"), [(0, []), (1, [3.0]), (3, [3.0, 6.0, 12.0]), (4, None)])
def test_each_retry_waits_twice_as_long_and_there_are_so_many(times: int, waits: list[float] | None) -> None:
    reader = DocumentReader(ReadPolicy(retries=3, first_wait=3.0), "d")
    waited: list[float] = []

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return False

    reader.stopped = Stopped()
    if waits is None:
        with pytest.raises(UserError, match="cannot be read, after 3 retries: OSError: the network is away"):
            reader.next(Broken(times))  # type: ignore[arg-type]
        assert waited == [3.0, 6.0, 12.0]
    else:
        assert reader.next(Broken(times)) == "text"  # type: ignore[arg-type]
        assert waited == waits
