"""How the parts of a row become lines of provenance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy

from harness.letters import letters, stream
from harness.loaders import plan
from titan_core.api import DocumentPlace
from titan_core.api.data.replay import ReadDocument, StepRows, UsedTokens
from titan_data.provenance.documents import used_documents
from titan_data.provenance.recorded_run import Segment

FIRST = ReadDocument(2, DocumentPlace("a:1", 7), 9)
SAME_PLACE = ReadDocument(2, DocumentPlace("a:1", 7), 9)
UNKNOWN = ReadDocument(0, None, 5)


def lines(used: list[list[UsedTokens]], shards: list[int] | None = None) -> list[tuple[Any, ...]]:
    spec = stream(letters("3,4"), plan=plan(1, global_size=4, shards=2, seq_len=12))
    job: Any = SimpleNamespace(data=spec)
    replay: Any = None
    empty = numpy.zeros((len(used), 13))
    rows = StepRows(empty, None, [], [0] * len(used), {}, 0, 0, 0, False, used=used)
    found = used_documents(Segment(job, replay), rows, shards)
    return [(one.row, one.shard, one.place, one.index, one.first_token, one.tokens, one.of, one.epoch) for one in found]


def test_the_parts_of_a_document_are_one_line() -> None:
    parts = [UsedTokens(FIRST, 0, 4), UsedTokens(FIRST, 4, 2), UsedTokens(FIRST, 6, 3)]
    assert lines([parts]) == [(0, 0, "a:1", 7, 0, 9, 9, 2)]


def test_what_does_not_continue_is_a_line_of_its_own() -> None:
    apart = [UsedTokens(FIRST, 0, 4), UsedTokens(FIRST, 5, 2), UsedTokens(SAME_PLACE, 7, 2), UsedTokens(UNKNOWN, 0, 5)]
    found = [(first, tokens) for _, _, _, _, first, tokens, _, _ in lines([apart])]
    assert found == [(0, 4), (5, 2), (7, 2), (0, 5)]
    assert lines([apart])[-1] == (0, 0, None, None, 0, 5, 5, 0)


def test_rows_are_those_of_the_global_batch() -> None:
    used = [[UsedTokens(FIRST, 0, 9)]] * 2
    assert [(row, shard) for row, shard, *_ in lines(used * 2)] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [(row, shard) for row, shard, *_ in lines(used, [1])] == [(2, 1), (3, 1)]
    assert lines([[], [UsedTokens(FIRST, 0, 9)]])[0][0] == 1
