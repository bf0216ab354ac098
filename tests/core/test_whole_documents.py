"""Documents that must not be cut: packed into sequences whole, each exactly once, with resumable positions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy
import pytest
from hypothesis import given, strategies as st

from titan_core.api import ExcludedRecord, ShuffledDocuments, UserError, WeightedTokens
from titan_core.api.data.dataset import ReadPolicy
from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_core.data.tokens import TokenStream
from titan_core.data.window import Window
from titan_core.toolkit.reading import DocumentReader


class Whole:
    """Documents of the given lengths; document ``n`` repeats the id ``n``. Length 0: a record that is excluded."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def text(self, index: int) -> WeightedTokens:
        if not self.lengths[index]:
            raise ExcludedRecord(f"record {index}", "too long")
        ids = numpy.full(self.lengths[index], index)
        return WeightedTokens(ids, numpy.ones(len(ids)), whole=True)


def stream(lengths: list[int], on_end: Any = "once") -> TokenStream:
    source = ShuffledDocuments(Whole(lengths), seed=0)
    return TokenStream(source, ByteTokenizer(), 0, 1, on_end, "whole", DocumentReader(ReadPolicy(), "whole"))


def windows(tokens: TokenStream, length: int) -> Iterator[Window]:
    while (window := tokens.take(length)) is not None:
        yield window


LENGTHS = st.lists(st.integers(0, 8), min_size=1, max_size=20)


@given(LENGTHS, st.integers(8, 20))
def test_each_document_is_in_one_window_once(lengths: list[int], length: int) -> None:
    found = list(windows(stream(lengths), length))
    assert all(0 < len(window) <= length for window in found)
    pieces = [(int(piece[0]), len(piece)) for window in found for piece in window.pieces]
    assert sorted(pieces) == [(index, count) for index, count in enumerate(lengths) if count]
    for window, following in pairwise(found):
        assert len(window) + len(following.pieces[0]) > length  # no room is left for the next document


@given(LENGTHS.filter(any), st.integers(8, 20), st.integers(0, 6), st.booleans())
def test_a_position_resumes_at_the_next_document(lengths: list[int], length: int, taken: int, repeated: bool) -> None:
    on_end = "repeat" if repeated else "once"
    tokens, resumed = stream(lengths, on_end), stream(lengths, on_end)
    for _ in range(taken):
        tokens.take(length)
    resumed.load_state_dict(tokens.state_dict())
    for _ in range(6):
        expected, found = tokens.take(length), resumed.take(length)
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert [piece.tolist() for piece in expected.pieces] == [piece.tolist() for piece in found.pieces]


def test_a_document_longer_than_a_sequence_is_a_mistake_of_the_plugin() -> None:
    with pytest.raises(UserError, match=r"has 9 tokens and must not be cut, but a sequence has room for 8"):
        stream([9]).take(8)


def test_excluded_records_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    reader = DocumentReader(ReadPolicy(), "whole")
    shard = ShuffledDocuments(Whole([0] * 30 + [1]), seed=0).shard(0, 1, 0)
    assert reader.next(shard) is not None
    assert reader.next(shard) is None
    assert (reader.empty, reader.corrupt) == (30, 0)
    assert len(caplog.records) == 21 and "counted but not logged" in caplog.text


def test_a_shard_of_excluded_records_only_is_an_error() -> None:
    with pytest.raises(UserError, match="settings exclude every record"):
        stream([0, 0], "repeat").take(8)
