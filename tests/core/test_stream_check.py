"""A stream that is not where its state says is refused by name, whatever is at fault; or it is the stream of a run
that was not interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest

from harness.letters import BYTE, letters, stream
from harness.loaders import LENGTHS, close, global_batch, loaders_of, merged, plan
from harness.planted_sources import (
    AtZero,
    FromTheBeginning,
    Frozen,
    InsideADocument,
    OneLost,
    OneTwice,
    OtherEpoch,
    Records,
    Relative,
    Source,
)
from titan_core.api import CorruptRecord, Document, DocumentSource, ExcludedRecord, UserError, WeightedTokens
from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_core.data.loader import DataLoader
from titan_core.toolkit.stream_check import DIFFERENT, LONGEST, ShardName, StreamCheck, digest_of

SHARDS, STEPS = 2, 40
BLANKS = ["a page without text"] * 5
"""Copies, among which a shift by one cannot be seen from one document alone."""
FILES = [
    [
        text
        for number in range(6)
        for text in (f"{name}{number}" * (1 + number * 5 % 7), *(BLANKS if number % 3 == 0 else ()))
    ]
    for name in ("apple", "birch", "cedar", "dogwood", "elder", "fir")
]


def edited(at: int, to: str = "edited") -> list[list[Any]]:
    files = [list(file) for file in FILES]
    for file in files:
        if at < len(file):
            file[at] = to
            return files
        at -= len(file)
    raise AssertionError("no such record")


def removed(at: int) -> list[list[Any]]:
    return [[record for record in file if record is not None] for file in edited(at, None)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fault:
    resumed: Callable[[], DocumentSource]
    """The source with which the run is resumed."""
    seed: int = 0
    refused: bool = True
    """Whether some of the interruptions end in an error. Every other one resumes the same stream."""
    now: Source | None = None
    """The data as they are now, if they were changed: behind the position it is these that are read."""


def changed(files: list[list[Any]]) -> Fault:
    return Fault(lambda: Source(files), now=Source(files))


FAULTS = {
    "frozen position": Fault(lambda: Source(FILES, Frozen)),
    "position stays at zero": Fault(lambda: Source(FILES, AtZero)),
    "position counted from the restored one": Fault(lambda: Source(FILES, Relative)),
    "starts again": Fault(lambda: Source(FILES, FromTheBeginning)),
    "one record lost": Fault(lambda: Source(FILES, OneLost)),
    "one record lost from the data": changed(removed(2)),
    "one record twice": Fault(lambda: Source(FILES, OneTwice)),
    "one record twice in the data": changed([FILES[0][:3] + FILES[0][2:], *FILES[1:]]),
    "another order of files": Fault(lambda: Source(FILES[::-1])),
    "another order of two files": Fault(lambda: Source([FILES[1], FILES[0], *FILES[2:]])),
    "a file changed in place": Fault(lambda: Source([[text.upper() for text in file] for file in FILES])),
    "another shard": Fault(lambda: Source(FILES, shift=1)),
    "another epoch": Fault(lambda: OtherEpoch(FILES)),
    "truncated file": changed([FILES[0][:4], *FILES[1:]]),
    "truncated data": changed([FILES[0][:4]]),
    "another seed of the shuffle buffer": Fault(lambda: Source(FILES), seed=1),
    "inside a document": Fault(lambda: Source(FILES, InsideADocument)),
    "no fault": Fault(lambda: Source(FILES), refused=False),
}


def loader(source: DocumentSource, buffer: int = 0, seed: int = 0) -> DataLoader:
    shape = plan(1, global_size=SHARDS, shards=SHARDS, seq_len=15)
    spec = replace(stream(letters("stream:1"), plan=shape, shuffle_buffer=buffer, on_corrupt="skip"), seed=seed)
    return DataLoader(spec, [source], BYTE, 0, ahead=0)


def batches(source: DocumentSource, buffer: int, steps: int = STEPS) -> list[Any]:
    whole = loader(source, buffer)
    read = [global_batch([whole]) for _ in range(steps)]
    close([whole])
    return read


def resumed(source: DocumentSource, state: Any, buffer: int, seed: int, steps: int) -> tuple[list[Any], Any]:
    """Return the batches of a resumed run, and its state afterwards."""
    other = loader(source, buffer, seed)
    state["stream_of"]["training.seed"] = seed  # as if it were the same
    other.load_state_dict(state)
    try:
        return [global_batch([other]) for _ in range(steps)], merged([other])
    finally:
        close([other])


@pytest.mark.parametrize("buffer", [0, 6])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_stream_resumed_twice_is_refused_or_equal_to_an_uninterrupted_one(fault: str, buffer: int) -> None:
    planted = FAULTS[fault]
    if planted.seed and not buffer:
        planted = replace(planted, refused=False)
    expected = batches(Source(FILES), buffer)
    as_now = batches(planted.now, buffer) if planted.now else expected
    found = []
    for stop in range(1, STEPS - 4, 3):
        first = loader(Source(FILES), buffer)
        for step in range(stop):
            assert global_batch([first]) == expected[step]
        state = merged([first])
        close([first])
        try:
            once, state = resumed(planted.resumed(), state, buffer, planted.seed, 2)
            twice, _ = resumed(planted.resumed(), state, buffer, planted.seed, 2)
            whole = [*expected[:stop], *once, *twice]
            assert whole in (expected[: stop + 4], as_now[: stop + 4])
        except UserError as error:
            (problem,) = error.problems
            found.append(problem)
    assert bool(found) == planted.refused
    for problem in found:
        assert problem.where.startswith("dataset 'letters', logical shard ")
        assert "data position mismatch" in problem.why
        assert 'add "dataset.letters.content" to checkpoint.allow_changed' in problem.fix


@pytest.mark.parametrize("at", range(20))
def test_a_record_edited_before_the_position_is_refused_if_the_stream_still_needs_it(at: int) -> None:
    """A record that was used and is not read again cannot change what the run reads afterwards."""
    refusals: list[str] = []
    for buffer in (0, 6):
        expected = batches(Source(FILES), buffer, 12)
        first = loader(Source(FILES), buffer)
        for _ in range(8):
            global_batch([first])
        try:
            rest, _ = resumed(Source(edited(at)), merged([first]), buffer, 0, 4)
        except UserError as error:
            refusals.append(str(error))
        else:
            assert [*expected[:8], *rest] in (expected, batches(Source(edited(at)), buffer, 12))
        close([first])
    assert all("data position mismatch" in text for text in refusals)


NAME = ShardName("copies", 0, 1)


@pytest.mark.parametrize("copies", [1, 2, 5, 20, 40])
@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_copies_do_not_hide_a_shift(copies: int, shift: int) -> None:
    texts = ["zero", "one", "two", *["copy"] * copies, "four", "five"]
    shard, check = Records(texts), StreamCheck(NAME, {"next": 0})
    for text in texts:
        assert check.read(shard) == text
        moved = check.position["document"]["next"] + shift
        if moved >= 0:
            other = StreamCheck(NAME, {"next": moved}, check.position["records"] - 1)
            other.read(Records(texts))
            assert other.digest != check.digest


def test_a_check_is_short_and_restored_with_its_position() -> None:
    for texts in ([f"{number}" for number in range(300)], ["same"] * 300, ["a", "b"] * 150, ["a", "b", "c", "c"] * 75):
        shard, check = Records(texts), StreamCheck(NAME, {"next": 0})
        for read in range(1, 299):
            check.read(shard)
            begin, records = check.position["document"], check.position["records"]
            assert begin["next"] + records == read
            assert records <= 2 * (LONGEST if len(set(texts)) < DIFFERENT else DIFFERENT + 1)
            if read % 50 == 1:
                again, other = Records(texts), StreamCheck(NAME, begin, records - 1)
            assert other.read(again) == texts[read - 1]
            assert (other.position, other.digest) == (check.position, check.digest)


def test_a_source_may_write_each_document_into_the_same_array() -> None:
    class Reused(Records):
        array = numpy.zeros(1, numpy.uint8)

        def __next__(self) -> Any:
            self.array[0] = super().__next__()
            return self.array

    numbers = list(range(20))
    copied = Records([numpy.array([number], numpy.uint8) for number in numbers])
    reused, first, second = Reused(numbers), StreamCheck(NAME, {"next": 0}), StreamCheck(NAME, {"next": 0})
    for _ in numbers:
        first.read(reused)
        second.read(copied)
        assert first.digest == second.digest


def test_records_without_a_document_are_read_again_and_reported_once() -> None:
    bad = {3: CorruptRecord("here", "corrupt"), 4: ExcludedRecord("here", "too long"), 9: CorruptRecord("there", "corrupt")}
    source = Source([[bad.get(number, f"record {number} {number % 5 * 'x'}") for number in range(16)]])
    whole = loader(source)
    expected = [whole.next_step() for _ in range(12)]
    for stop in range(1, 10):
        first, other = loader(source), loader(source)
        for _ in range(stop):
            before = first.next_step()
        other.load_state_dict(merged([first]))
        for step in range(stop, stop + 2):
            found, asked = other.next_step(), expected[step]
            assert before and found and asked
            assert found.microbatches[0].tokens.equal(asked.microbatches[0].tokens)
            assert before.corrupt + found.corrupt == asked.corrupt
            assert before.empty + found.empty == asked.empty
        close([first], [other])
    close([whole])


def test_a_shuffle_buffer_keeps_its_documents_when_a_record_is_excluded() -> None:
    records: list[Any] = [ExcludedRecord("here", "too long") if number == 4 else f"record {number}" for number in range(6)]
    source = Source([records])
    whole = loader(source, buffer=3)
    read = "".join(BYTE.decode(row) for _ in range(8) for row in global_batch([whole]) or [])
    assert all(text in read for text in records if isinstance(text, str))
    close([whole])


def test_a_source_that_loses_its_place_at_a_retry_is_refused() -> None:
    class Unreliable(OneLost):
        failed = False

        def __next__(self) -> Document:
            if self.next == 7 and not self.failed:
                self.failed = True
                raise ConnectionResetError("peer")
            return super().__next__()

    broken = loader(Source(FILES, Unreliable))
    with pytest.raises(UserError, match=r"dataset 'letters', logical shard . of 2, position .* data position mismatch"):
        list(itertools.takewhile(bool, (global_batch([broken]) for _ in range(STEPS))))
    close([broken])


def test_the_user_may_accept_other_documents() -> None:
    for buffer in (0, 6):
        first = loader(Source(FILES), buffer)
        for _ in range(9):
            global_batch([first])
        state = merged([first])
        for files in (FILES[::-1], [[text[:2] for text in file] for file in FILES], [FILES[0][:4]]):
            other = loader(Source(files), buffer)
            other.load_state_dict(state, ["dataset.letters.content"])
            assert [global_batch([other]) for _ in range(3)].count(None) == 0
            close([other])
        close([first])


@pytest.mark.parametrize("buffer", [0, 6])
@pytest.mark.parametrize(
    "damage",
    [
        {"records": -1},
        {"records": "2"},
        {"document": 3},
        {"used": None},
        *({"digest": digest} for digest in ({}, [], 0, False, 3)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("begun", [True, False])
def test_a_damaged_position_is_found_before_anything_is_read(damage: dict[str, Any], begun: bool, buffer: int) -> None:
    """So that an older checkpoint is restored."""
    first, other = loader(Source(FILES), buffer), loader(Source(FILES), buffer)
    if begun:
        global_batch([first])
    state = merged([first])
    of_stream = state["shards"]["0"]["streams"][0]
    assert bool(of_stream["digest"]) is begun
    of_stream.update(damage)
    with pytest.raises(ValueError, match="logical shard 0 has no valid position"):
        other.load_state_dict(state)
    close([first], [other])


def test_a_position_in_another_order_of_a_stream_is_damaged() -> None:
    states = []
    for buffer in (0, 6):
        first = loader(Source(FILES), buffer)
        global_batch([first])
        states.append(merged([first]))
        close([first])
    for buffer, state in zip((6, 0), states, strict=True):
        other = loader(Source(FILES), buffer)
        with pytest.raises(ValueError, match="logical shard 0 has no valid position"):
            other.load_state_dict(state, ["data.shuffle_buffer"])
        close([other])


@pytest.mark.parametrize("damage", [{"digest": "0"}, {"used": 0}, {"records": 2}, {"epoch": 1}], ids=repr)
def test_another_position_is_refused_where_its_documents_are_read(damage: dict[str, Any]) -> None:
    first, other = loader(Source(FILES)), loader(Source(FILES))
    for _ in range(5):
        global_batch([first])
    state = merged([first])
    state["shards"]["0"]["streams"][0].update(damage)
    other.load_state_dict(state)
    with pytest.raises(UserError, match=r"logical shard 0 of 2, position .*data position mismatch"):
        global_batch([other])
    close([first], [other])


class OtherTokenizer(ByteTokenizer):
    """With the fingerprint of another one."""

    def fingerprint(self) -> str:
        return BYTE.fingerprint()

    def encode_document(self, text: str) -> Any:
        ids = numpy.array(super().encode_document(text))
        return numpy.where(ids == ord("e"), ord("E"), ids)


def test_other_tokens_are_refused() -> None:
    refused = 0
    for stop in range(1, 12):
        first = loader(Source(FILES))
        for _ in range(stop):
            global_batch([first])
        other = DataLoader(first._spec, [Source(FILES)], OtherTokenizer(), 0, ahead=0)
        other.load_state_dict(merged([first]))
        try:
            global_batch([other])
        except UserError as error:
            refused += "data position mismatch" in str(error)
        close([first], [other])
    assert refused > 5


def test_worker_processes_refuse_too() -> None:
    spec = stream(letters(LENGTHS), plan=plan(1))
    first, other = loaders_of(spec, workers=0), loaders_of(spec, workers=2)
    for _ in range(5):
        global_batch(first)
    state = merged(first)
    state["shards"]["3"]["streams"][0]["document"]["next"] += 1
    other[0].load_state_dict(state)
    with pytest.raises(UserError, match=r"dataset 'letters', logical shard 3 of 8, position .* data position mismatch"):
        global_batch(other)
    close(first, other)


def test_tokens_and_their_weights_have_a_digest() -> None:
    def of(ids: list[int], weights: list[float], whole: bool = False) -> int:
        return digest_of(WeightedTokens(numpy.array(ids), numpy.array(weights), whole))

    digests = [of([1, 2], [0, 1]), of([1, 3], [0, 1]), of([1, 2], [1, 1]), of([1, 2], [0, 1], True)]
    digests += [digest_of(text) for text in ("a", "\ud83d", numpy.array([97]), numpy.array([], numpy.uint32))]
    assert len(set(digests)) == len(digests)
