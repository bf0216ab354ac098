"""A stream that does not stand where its state says is refused by name, whatever is at fault; or it is the stream of a run
that was not interrupted."""

from __future__ import annotations

import json
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
from titan_core.data import witness
from titan_core.data.loader import DataLoader
from titan_core.data.witness import ShardName, WitnessedShard, computed

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
        assert "stands elsewhere" in problem.why
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
    assert all("stands elsewhere" in text for text in refusals)


@pytest.mark.parametrize("copies", [1, 2, 5, 20, 40])
@pytest.mark.parametrize("shift", [1, 2])
def test_copies_do_not_hide_a_shift(copies: int, shift: int) -> None:
    texts = ["one", "two", "three", *["copy"] * copies, "four", "five"]
    shard = WitnessedShard(Records(texts), ShardName("copies", 0, 1))
    for read in range(1, len(texts)):
        assert next(shard) == texts[read - 1]
        state = json.loads(json.dumps(computed(shard.state_dict())))
        for moved in (shift, -shift):
            other = WitnessedShard(Records(texts), ShardName("copies", 0, 1))
            wrong = max(state["from"]["next"] + moved, 0)
            if wrong == state["from"]["next"]:
                continue
            other.load_state_dict({**state, "from": {"next": wrong}})
            with pytest.raises(UserError, match=r"dataset 'copies', logical shard 0 of 1, position .* stands elsewhere"):
                next(other)


def test_a_witness_is_short_and_restored_with_its_position() -> None:
    for texts in ([str(number) for number in range(300)], ["same"] * 300, ["a", "b"] * 150):
        shard, name = WitnessedShard(Records(texts), ShardName("many", 0, 1)), ShardName("many", 0, 1)
        for read in range(1, 299):
            next(shard)
            state = computed(shard.state_dict())
            assert state["documents"] <= (witness.LONGEST if len(set(texts)) < witness.DISTINCT else witness.DISTINCT)
            assert len(json.dumps(state)) < 100
            if read % 50 == 0:
                other = WitnessedShard(Records(texts), name)
                other.load_state_dict(json.loads(json.dumps(state)))
                assert other.state_dict() == state  # saved again before anything was read
                assert next(other) == texts[read]
                after = WitnessedShard(Records(texts), name)
                after.load_state_dict(state)
                next(after)
                assert computed(after.state_dict()) == computed(other.state_dict())


@pytest.mark.parametrize("ids", [False, True])
def test_documents_are_hashed_when_a_position_is_saved(ids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not while they are read, even if the source then writes the next one into the same array."""
    hashed: list[Any] = []
    of = witness.digest_of
    monkeypatch.setattr(witness, "digest_of", lambda document: hashed.append(document) or of(document))

    class Reused(Records):
        array = numpy.zeros(1, numpy.uint8)

        def __next__(self) -> Any:
            self.array[0] = ord(super().__next__())
            return self.array if ids else chr(self.array[0])

    shard = WitnessedShard(Reused(list("abcdefghijklmnopqrstuvwxyz")), ShardName("reused", 0, 1))
    positions = [shard.state_dict() for _ in zip(range(20), shard, strict=False)]
    assert hashed == []
    assert computed(positions[9])["documents"] == 3
    shown = [document if isinstance(document, str) else chr(document[0]) for document in hashed]
    assert "".join(sorted(set(shown))) == "hij"
    assert computed(positions[9]) == json.loads(json.dumps(computed(positions[9])))


def test_records_without_a_document_are_witnessed_and_reported_once() -> None:
    bad = {3: CorruptRecord("here", "corrupt"), 4: ExcludedRecord("here", "too long"), 9: CorruptRecord("there", "corrupt")}
    files = [[bad.get(number, f"record {number} {number % 5 * 'x'}") for number in range(16)]]
    expected = batches(Source(files), 0, 12)
    for stop in range(1, 10):
        first = loader(Source(files))
        for _ in range(stop):
            global_batch([first])
        rest, _ = resumed(Source(files), merged([first]), 0, 0, 2)
        assert rest == expected[stop : stop + 2]
        close([first])


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
    with pytest.raises(UserError, match=r"dataset 'letters', logical shard . of 2, position .* stands elsewhere"):
        list(iter(lambda: global_batch([broken]), None))
    close([broken])


def test_the_user_may_accept_other_documents() -> None:
    for buffer in (0, 6):
        first = loader(Source(FILES), buffer)
        for _ in range(9):
            global_batch([first])
        state = merged([first])
        for files in (FILES[::-1], [[text[:2] for text in file] for file in FILES]):
            other = loader(Source(files), buffer)
            other.load_state_dict(state, ["dataset.letters.content"])
            assert [global_batch([other]) for _ in range(3)].count(None) == 0
            close([other])
        close([first])


def test_positions_saved_before_there_were_witnesses_are_accepted() -> None:
    for buffer in (0, 6):
        expected = batches(Source(FILES), buffer, 12)
        first = loader(Source(FILES), buffer)
        for _ in range(7):
            global_batch([first])
        state = merged([first])
        for shard in state["shards"].values():
            for one in shard["streams"]:
                del one["digest"]
                one["document"] = old_form(one["document"])
        rest, _ = resumed(Source(FILES), state, buffer, 0, 5)
        assert rest == expected[7:12]
        close([first])


def old_form(document: Any) -> Any:
    """Return the position of a document as it was saved before."""
    if "begin" in document:
        return {"block": document["block"], "begin": after(document["begin"]), "given": document["given"]}
    return after(document)


def after(position: Any) -> Any:
    return {"next": position["from"]["next"] + position["documents"]}


@pytest.mark.parametrize("damage", [{"documents": -1}, {"documents": "2"}, {"from": 3}, None])
def test_damaged_witnesses_are_refused(damage: Any) -> None:
    first = loader(Source(FILES))
    global_batch([first])
    state = merged([first])
    of_stream = state["shards"]["0"]["streams"][0]
    of_stream["document"] = {**of_stream["document"], **damage} if damage else {"from": {"next": 0}}
    other = loader(Source(FILES))
    with pytest.raises(ValueError, match=r"logical shard 0 has no valid position"):
        other.load_state_dict(state)
    close([first], [other])


@pytest.mark.parametrize("damage", [{}, [], 0, False, 3], ids=repr)
@pytest.mark.parametrize("of_document", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_digest_of_another_type_is_damage(damage: Any, of_document: bool, begun: bool) -> None:
    """Which is found before anything is read, so that an older checkpoint is restored."""
    first, other = loader(Source(FILES)), loader(Source(FILES))
    if begun:
        global_batch([first])
    state = merged([first])
    of_stream = state["shards"]["0"]["streams"][0]
    assert bool(of_stream["digest"]) is bool(of_stream["document"]["digest"]) is begun
    (of_stream["document"] if of_document else of_stream)["digest"] = damage
    try:
        with pytest.raises(ValueError, match="logical shard 0 has no valid position"):
            other.load_state_dict(state)
    finally:
        close([first], [other])


@pytest.mark.parametrize("of_document", [True, False])
def test_another_digest_is_refused_where_its_documents_are_read(of_document: bool) -> None:
    first, other = loader(Source(FILES)), loader(Source(FILES))
    global_batch([first])
    state = merged([first])
    of_stream = state["shards"]["0"]["streams"][0]
    (of_stream["document"] if of_document else of_stream)["digest"] = "0"
    other.load_state_dict(state)
    try:
        with pytest.raises(UserError, match="logical shard 0"):
            global_batch([other])
    finally:
        close([first], [other])


def test_an_offset_inside_a_document_is_part_of_its_witness() -> None:
    first = loader(Source(FILES))
    global_batch([first])
    state = merged([first])
    state["shards"]["0"]["streams"][0]["used"] -= 1
    other = loader(Source(FILES))
    other.load_state_dict(state)
    with pytest.raises(UserError, match=r"logical shard 0 of 2, .* is not the one of which [0-9]+ were used"):
        global_batch([other])
    close([first], [other])


def test_worker_processes_refuse_too() -> None:
    spec = stream(letters(LENGTHS), plan=plan(1))
    first, other = loaders_of(spec, workers=0), loaders_of(spec, workers=2)
    for _ in range(5):
        global_batch(first)
    state = merged(first)
    state["shards"]["3"]["streams"][0]["document"]["from"]["next"] += 1
    other[0].load_state_dict(state)
    with pytest.raises(UserError, match=r"dataset 'letters', logical shard 3 of 8, position .* stands elsewhere"):
        global_batch(other)
    close(first, other)


def test_tokens_and_their_weights_are_witnessed() -> None:
    def of(ids: list[int], weights: list[float], whole: bool = False) -> bytes:
        return witness.digest_of(WeightedTokens(numpy.array(ids), numpy.array(weights), whole))

    digests = [of([1, 2], [0, 1]), of([1, 3], [0, 1]), of([1, 2], [1, 1]), of([1, 2], [0, 1], True)]
    digests += [witness.digest_of(text) for text in ("", "a", "\ud83d", numpy.array([97]), numpy.array([], numpy.uint32))]
    assert len(set(digests[:-1])) == len(digests) - 1
