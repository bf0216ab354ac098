"""Packing by best fit: every token once, no short document cut, the same on any mesh and after any interruption."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy
import pytest
from hypothesis import given, settings, strategies as st

from harness.letters import BYTE, letters, stream
from harness.loaders import MIXED, close, global_batch, loaders_of, merged, plan
from harness.tagged import FIELDS
from titan_core.api import DatasetContext, Ref, ShuffledDocuments, UserError, WeightedTokens
from titan_core.api.data.dataset import DatasetSpec, StreamSpec
from titan_core.data.best_fit import best_fit
from titan_core.data.loader import DataLoader
from titan_core.data.shards import ShardGroup
from titan_core.data.streams import open_sources

ROOM = 24  # seq_len + 1
LENGTHS = ",".join(str(1 + index * 7 % 60) for index in range(120))
"""Documents of 3 to 62 tokens, with those that mark begin and end."""


def spec(*datasets: DatasetSpec, ranks: int = 1, window: int = 5, on_end: str = "repeat", **more: Any) -> StreamSpec:
    shape = {"global_size": 8, "shards": 8, "seq_len": ROOM - 1, **more}
    return stream(*(datasets or (letters(LENGTHS),)), plan=plan(ranks, **shape), on_end=on_end, packing_window=window)


def naive(sizes: list[int], room: int) -> list[int]:
    """Return how full each sequence is, by a search of all sequences for each piece."""
    used: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [number for number in range(len(used)) if used[number] + size <= room]
        if fitting:
            used[max(fitting, key=lambda number: used[number])] += size
        else:
            used.append(size)
    return sorted(used)


@settings(max_examples=300)
@given(st.lists(st.integers(1, 20), max_size=60))
def test_pieces_are_packed_as_by_the_definition(sizes: list[int]) -> None:
    packed = best_fit(sizes, 20)
    assert sorted(itertools.chain(*packed)) == list(range(len(sizes)))
    assert sorted(sum(sizes[number] for number in numbers) for numbers in packed) == naive(sizes, 20)


def test_an_example() -> None:
    packed = best_fit([5, 8, 3, 2, 10, 1], 10)
    assert sorted(sorted(numbers) for numbers in packed) == [[0, 2, 5], [1, 3], [4]]


def rows_of(made: StreamSpec, steps: int) -> list[list[list[int]]]:
    """Return the documents in each row of some steps."""
    group, found = ShardGroup(made, open_sources(made), BYTE, range(made.plan.logical_shards)), []
    for _ in range(steps):
        rows = group.read()
        if rows is None:
            break
        for tokens, lengths in zip(rows.tokens.tolist(), rows.lengths, strict=True):
            ends = list(itertools.accumulate(lengths))
            found.append([tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)])
    return found


@pytest.mark.parametrize("window", [1, 2, 7, 1000])
def test_only_documents_longer_than_a_sequence_are_cut(window: int) -> None:
    pieces = list(itertools.chain(*rows_of(spec(window=window, on_end="once"), 100)))
    assert all(piece[0] == 256 and piece[-1] == 257 for piece in pieces if len(piece) < ROOM and 256 in piece)
    whole = Counter(len(piece) for piece in pieces if piece[0] == 256 and piece[-1] == 257)
    lengths = [int(length) + 2 for length in LENGTHS.split(",")]
    assert whole == Counter(length for length in lengths if length <= ROOM)
    assert sum(map(len, pieces)) == sum(lengths)  # each token once
    assert sum(piece[0] == 256 for piece in pieces) == len(lengths)


def test_padding_falls_with_the_window_and_documents_are_counted() -> None:
    padding = {}
    for window in (1, 4, 30):
        made = spec(window=window, shards=1, global_size=8)
        group = ShardGroup(made, open_sources(made), BYTE, range(1))
        rows = [group.read() for _ in range(200)]
        padding[window] = 1 - sum(sum(map(sum, one.lengths)) for one in rows if one) / (200 * 8 * ROOM)
        last = rows[-1]
        assert last is not None
        lengths = [int(length) + 2 for length in LENGTHS.split(",")]
        share = sum(length > ROOM for length in lengths) / len(lengths)
        assert last.cut / last.documents == pytest.approx(share, abs=0.02)
    assert padding[1] > 0.2 > padding[4] > padding[30] and padding[30] < 0.03


def test_concatenation_counts_cut_documents() -> None:
    made = spec(letters("2,50,4,4,90,1"), window=0, shards=1, global_size=1, on_end="once")
    group = ShardGroup(made, open_sources(made), BYTE, range(1))
    rows = list(itertools.takewhile(lambda one: one is not None and not one.ended, (group.read() for _ in range(40))))
    pieces = Counter(len(one.lengths[0]) for one in rows if one)
    last = rows[-1]
    assert last is not None and last.documents == 6
    pieces_in_all = sum(count * number for count, number in pieces.items())
    assert 2 <= last.cut <= 6 and pieces_in_all >= 6 + last.cut


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.full) if seed > 5 or seed == 4 else seed for seed in range(16)]
)
def test_a_packed_stream_is_the_same_on_any_mesh_and_after_interruptions(seed: int) -> None:
    generator = random.Random(seed)
    workers = 2 if seed % 5 == 4 else 0
    documents = MIXED if seed % 2 else (letters(LENGTHS),)
    window = generator.choice([1, 3, 8, 40])
    made = spec(*documents, window=window)
    if seed % 3 == 0:
        made = replace(made, shuffle_buffer=4, datasets=(letters(f"stream:{LENGTHS}"),))

    def division() -> list[DataLoader]:
        ranks = generator.choice([1, 2, 4])
        return loaders_of(replace(made, plan=plan(ranks, seq_len=ROOM - 1)), workers=workers, document_mask=True)

    uninterrupted, current = loaders_of(made), division()
    for _ in range(4):
        for _ in range(generator.randrange(25)):
            assert global_batch(uninterrupted) == global_batch(current)
        for loader in current:
            loader.peek()
        state, resumed = merged(current), division()
        for loader in resumed:
            loader.load_state_dict(state)
        assert merged(resumed) == state  # saved again before anything was read
        close(current)
        current = resumed
    for _ in range(12):
        assert global_batch(uninterrupted) == global_batch(current)
    close(uninterrupted, current)


@pytest.mark.parametrize(
    "lengths", ["5,5,5,5,5,5,5,5", "5,5,5,5,5,5,5,100", "0,5,5,5,5,5,5,5,5,5,0,5,5,5,5,5,5,5,5,5,0,5,5,5"]
)
@pytest.mark.parametrize("window", [1, 3])
def test_blocks_cross_epochs_and_resume_at_each_step(lengths: str, window: int) -> None:
    made = spec(letters(lengths), window=window)
    (whole,) = loaders_of(made)
    batches, states = [], []
    for _ in range(12):
        states.append(merged([whole]))
        batches.append(global_batch([whole]))
    for number, state in enumerate(states):
        (resumed,) = loaders_of(made)
        resumed.load_state_dict(state)
        assert [global_batch([resumed]) for _ in batches[number:]] == batches[number:]
        close([resumed])
    close([whole])


def test_a_dataset_that_ends_stops() -> None:
    made = spec(on_end="stop")
    pieces = list(itertools.chain(*rows_of(made, 1000)))
    lengths = [int(length) + 2 for length in LENGTHS.split(",")]
    # Shards end at different steps, and the job with the first of them.
    assert 0.5 * sum(lengths) < sum(map(len, pieces)) <= sum(lengths)


def test_an_empty_shard_is_refused() -> None:
    with pytest.raises(UserError, match="all 1 documents of logical shard"):
        rows_of(spec(letters("0,0,0,0,0,0,0,0")), 1)


def test_other_data_than_was_packed_is_refused() -> None:
    made = spec(letters(LENGTHS), shards=1, global_size=1)
    (loader,) = loaders_of(made)
    for _ in range(3):
        global_batch([loader])
    state = merged([loader])
    close([loader])
    other_order = replace(made, datasets=(letters(LENGTHS, seed=1),))
    short = replace(made, datasets=(letters("5"),), on_end="once")
    for changed in (other_order, short):
        (other,) = loaders_of(changed)
        other.load_state_dict({**state, "stream_of": other.state_dict()["stream_of"]})
        with pytest.raises(UserError, match="data position mismatch"):
            global_batch([other])
        close([other])
    (accepting,) = loaders_of(other_order)
    stream_of = accepting.state_dict()["stream_of"]
    accepting.load_state_dict({**state, "stream_of": stream_of}, ["dataset.letters.content"])
    assert global_batch([accepting]) is not None
    close([accepting])


def test_another_packing_is_another_stream() -> None:
    (packed,), (other,), (concatenated,) = loaders_of(spec()), loaders_of(spec(window=6)), loaders_of(spec(window=0))
    for first, second in itertools.permutations((packed, other, concatenated), 2):
        (change,) = second.refused_changes(first.state_dict())
        assert change.key == "data.packing" and change.allowable
        second.load_state_dict(first.state_dict(), ["data.packing"])
    close([packed, other, concatenated])


class Chats:
    """Documents that must not be cut, some of several parts, with weights."""

    def __len__(self) -> int:
        return 64

    def text(self, index: int) -> WeightedTokens:
        ids = numpy.arange(1 + index % 20) + index
        parts = (2, len(ids) - 2) if len(ids) > 4 and index % 2 else ()
        return WeightedTokens(ids, (numpy.arange(len(ids)) % 2).astype(numpy.float32), whole=True, parts=parts)


def open_chats(context: DatasetContext[None]) -> ShuffledDocuments:
    return ShuffledDocuments(Chats(), context.seed)


def test_documents_that_must_not_be_cut_are_packed_with_their_weights_and_parts() -> None:
    context: DatasetContext[None] = DatasetContext("chats", None, "text", 0, "", section=None)
    dataset = DatasetSpec("chats", 1.0, Ref(f"{__name__}:open_chats"), context)
    made = spec(dataset, window=16, shards=2, global_size=2, on_end="once")
    group, pieces = ShardGroup(made, open_sources(made), BYTE, range(2)), []
    while (rows := group.read()) is not None and not rows.ended:
        assert rows.weights is not None
        for tokens, weights, lengths in zip(rows.tokens.tolist(), rows.weights.tolist(), rows.lengths, strict=True):
            ends = list(itertools.accumulate(lengths))
            pieces += [(tokens[e - n : e], weights[e - n : e]) for e, n in zip(ends, lengths, strict=True)]
    expected = []
    for index in range(64):
        document, at = Chats().text(index), 0
        for size in document.parts or (len(document.ids),):
            expected.append((document.ids[at : at + size].tolist(), document.weights[at : at + size].tolist()))
            at += size
    assert sorted(pieces) == sorted(expected)
    assert rows is not None and rows.cut == 0 and rows.documents == 64


def test_a_document_that_must_not_be_cut_and_does_not_fit_is_refused() -> None:
    context: DatasetContext[None] = DatasetContext("chats", None, "text", 0, "", section=None)
    dataset = DatasetSpec("chats", 1.0, Ref(f"{__name__}:open_chats"), context)
    with pytest.raises(UserError, match="must not be cut, but a sequence has room for 12"):
        rows_of(spec(dataset, window=64, shards=2, global_size=2, seq_len=11), 1)


@pytest.mark.parametrize("name", ["tagged", "kinds"])
def test_extra_values_follow_their_tokens(name: str) -> None:
    context: DatasetContext[None] = DatasetContext(name, "64", "text", 0, "", section=None)
    dataset = DatasetSpec(name, 1.0, Ref("harness.tagged:open_tagged"), context, FIELDS[name])
    made = spec(dataset, window=8)
    group = ShardGroup(made, open_sources(made), BYTE, range(8))
    for _ in range(10):
        rows = group.read()
        assert rows is not None
        for row, lengths in enumerate(rows.lengths):
            if name == "kinds":
                assert len(lengths) == 1
            else:
                tags = rows.extras["tags"][row, : sum(lengths), 0]
                assert (tags == rows.tokens[row, : sum(lengths)] + 1).all()
