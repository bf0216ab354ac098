"""The orders of ``data.shuffle``: each document once, the same on any mesh and after a resume, in few large requests."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest

from harness.letters import letters, stream
from harness.loaders import close, loaders_of, merged, plan
from titan_core.api import ShuffledDocuments, UserError
from titan_core.api.data import orders
from titan_core.api.data.dataset import Shuffle
from titan_core.data.streams import open_sources
from titan_testing.jobs import make_job

KINDS: tuple[Shuffle, ...] = ("documents", "blocks", "none")


class Numbers:
    def __init__(self, size: int) -> None:
        self.size = size
        self.announced: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.size

    def text(self, index: int) -> str:
        return str(index)

    def read_ahead(self, first: int, last: int) -> None:
        self.announced.append((first, last))


def read(source: ShuffledDocuments, count: int, epoch: int = 0) -> list[list[int]]:
    return [[int(str(text)) for text in source.shard(index, count, epoch)] for index in range(count)]


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("shuffle", KINDS)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 17, 400, 5000, 20_011])
def test_each_document_once_an_epoch(shuffle: Shuffle, size: int) -> None:
    for count in (1, 3, 8):
        source = ShuffledDocuments(Numbers(size), 3, shuffle=shuffle)
        shards = read(source, count)
        assert sorted(chain.from_iterable(shards)) == list(range(size))
        if size >= 400:
            assert max(map(len, shards)) < 1.1 * min(map(len, shards)) + 1
            assert (shards == read(source, count, 1)) == (shuffle == "none")


def test_none_is_the_order_of_the_files() -> None:
    assert read(ShuffledDocuments(Numbers(10), 3, shuffle="none"), 2) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


@pytest.mark.parametrize("shuffle", KINDS)
def test_a_position_anywhere_is_restored(shuffle: Shuffle) -> None:
    source = ShuffledDocuments(Numbers(20_011), 3, shuffle=shuffle)
    whole = read(source, 2)[1]
    shard = source.shard(1, 2, 0)
    for done in (0, 1, 4095, 4096, 4097, 9000, len(whole) - 1):
        first = source.shard(1, 2, 0)
        for _ in range(done):
            next(first)
        shard.load_state_dict(first.state_dict())
        assert int(str(next(shard))) == whole[done]


def test_documents_of_sixteen_blocks_are_shuffled_together(tmp_path: Path) -> None:
    """Blocks have 4 MiB, if there are enough of them. Each is announced before its documents are read, and never again."""
    size, of_each = 64 * 40, 1 << 20  # 4 documents make a block
    (tmp_path / "file").touch()
    documents = Numbers(size)
    source = ShuffledDocuments(documents, 3, [tmp_path / "file"], "blocks")
    source.__dict__["_bytes"] = size * of_each, False
    (found,) = read(source, 1)
    blocks = [number // 4 for number in found]
    first = blocks[:64]
    assert len(set(first)) == 16
    assert sorted(found[:64]) == sorted(4 * block + place for block in set(first) for place in range(4))
    assert numpy.abs(numpy.diff(sorted(set(first)))).max() > 1, "not neighbours"
    assert sum(one == other for one, other in pairwise(blocks)) < 0.1 * size
    assert sorted(documents.announced) == [(first, first + 4) for first in range(0, size, 4)]
    announced = documents.announced[:32]  # two windows, when the first document is read
    assert {one // 4 for one in found[:128]} == {one // 4 for one, _ in announced}


def test_epochs_have_orders_of_blocks_and_windows_of_documents_of_their_own() -> None:
    def of_epoch(epoch: int) -> orders.Blocks:
        order = orders.order_of("blocks", 64 * 40, 64 * 40 << 20, 0, 1, (3, epoch))
        assert isinstance(order, orders.Blocks)
        return order

    def arrangement(window: int) -> list[tuple[int, int]]:
        """Return the number of the block in the window, and the place in it, of each document."""
        firsts = [first for first, _ in of_epoch(0).ranges_of(window)]
        documents = of_epoch(0).documents_at(64 * window, 64 * (window + 1)).tolist()
        return [(firsts.index(document // 4 * 4), document % 4) for document in documents]

    assert len(of_epoch(0).ranges_of(0)) == 16
    assert of_epoch(0).ranges_of(0) != of_epoch(1).ranges_of(0)
    assert sorted(arrangement(0)) == sorted(arrangement(1)) and arrangement(0) != arrangement(1)


def test_blocks_are_smaller_for_many_shards() -> None:
    """Each of them has 64, so that their lengths differ little."""
    size = 64 * 40
    order = orders.order_of("blocks", size, size << 20, 0, 16, (3, 0))
    assert isinstance(order, orders.Blocks)
    assert order.ranges_of(0)[0][1] - order.ranges_of(0)[0][0] == size // (64 * 16)
    tiny = orders.order_of("blocks", 30, 30 << 20, 0, 8, (3, 0))
    assert isinstance(tiny, orders.Blocks) and len(tiny) == 4


@pytest.mark.parametrize("shuffle", KINDS)
def test_the_tokens_of_a_step_are_the_same_on_any_ranks_and_after_a_resume(shuffle: Shuffle) -> None:
    def spec(ranks: int) -> Any:
        source = letters(",".join(str(3 + number % 7) for number in range(200)), seed=3)
        source = replaced(source, shuffle)
        return replace(stream(source, plan=plan(ranks)), shuffle=shuffle)

    def steps(ranks: int, number: int, state: Any = None) -> tuple[list[Any], Any]:
        loaders = loaders_of(spec(ranks))
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        found = []
        for _ in range(number):
            parts = [loader.next_step() for loader in loaders]
            found.append([batch.tokens.tolist() for part in parts if part for batch in part.microbatches])
        after = merged(loaders)
        close(loaders)
        return [[row for batch in step for row in batch] for step in found], after

    whole, _ = steps(1, 12)
    for ranks in (2, 4):
        assert steps(ranks, 12)[0] == whole
    before, state = steps(2, 5)
    assert before + steps(4, 7, state)[0] == whole


def replaced(dataset: Any, shuffle: Shuffle) -> Any:
    return replace(dataset, context=replace(dataset.context, shuffle=shuffle))


def test_a_dataset_without_the_order_is_refused(tmp_path: Path) -> None:
    spec = stream(letters("stream:3,4,5,6,7,8,9,3"), plan=plan(1))
    blocks = replace(spec, shuffle="blocks")
    with pytest.raises(UserError, match=r"data\.shuffle = 'blocks': dataset 'letters' has no such order: it is a stream"):
        open_sources(blocks)
    ignoring = stream(letters(",".join(["3"] * 20)), plan=plan(1))  # its context says "documents"
    with pytest.raises(UserError, match=r"its plugin does not use DatasetContext\.shuffle"):
        open_sources(replace(ignoring, shuffle="none"))
    assert make_job("tiny", {"data.shuffle": "blocks"}).data.datasets[0].context.shuffle == "blocks"


def test_a_position_of_another_order_is_refused() -> None:
    spec = stream(replaced(letters(",".join(["3"] * 20)), "documents"), plan=plan(1))
    other = stream(replaced(letters(",".join(["3"] * 20)), "none"), plan=plan(1))
    other = replace(other, shuffle="none")
    (first,), (second,) = loaders_of(spec), loaders_of(other)
    with pytest.raises(UserError, match=r"saved in another order \(documents, version 2\).*restore data\.shuffle, or start"):
        second.load_state_dict(merged([first]))
    close([first], [second])
