"""The token stream: nothing lost, nothing twice, the same on any number of ranks, and restored exactly."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.letters import BYTE, Letters, letters, stream
from titan_core.data.batch import IGNORE, with_positions
from titan_core.data.buffered_shuffle import BufferedShuffle, ShuffledStream
from titan_core.data.loader import DataLoader, _batch
from titan_core.data.mixture import Mixture
from titan_core.data.reading import DocumentReader, ReadPolicy, is_transient
from titan_core.data.shards import ShardGroup
from titan_core.data.shuffled import ShuffledDocuments
from titan_core.data.source import CorruptRecord
from titan_core.data.stream_spec import DatasetSpec, StreamSpec
from titan_core.data.tokens import TokenStream
from titan_core.errors import UserError
from titan_core.job.batch_plan import BatchPlan

LENGTHS = ",".join(str(1 + index * 7 % 23) for index in range(100))
MIXED = (letters(LENGTHS, weight=3.0), letters(LENGTHS, "digits", weight=1.0))


def plan(ranks: int, microbatches: int = 1, global_size: int = 8, shards: int = 8, seq_len: int = 7) -> BatchPlan:
    return BatchPlan(global_size, global_size // ranks // microbatches, microbatches, ranks, shards, seq_len)


def loaders_of(spec: StreamSpec, **options: Any) -> list[DataLoader]:
    return [DataLoader(spec, spec.open_sources(), BYTE, rank, **options) for rank in range(spec.plan.ranks)]


def loaders(ranks: int, microbatches: int = 1, workers: int = 0, on_end: str = "repeat", **shape: Any) -> list[DataLoader]:
    spec = stream(letters(LENGTHS), plan=plan(ranks, microbatches, **shape), on_end=on_end)
    return loaders_of(spec, workers=workers)


def close(*groups: list[DataLoader]) -> None:
    for loader in itertools.chain(*groups):
        loader.close()


def merged(loaders: list[DataLoader]) -> dict[str, Any]:
    """All ranks' positions in one, as a checkpoint would hold them: plain values, as on disk."""
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    return {**states[0], "shards": {key: value for state in states for key, value in state["shards"].items()}}


def global_batch(loaders: list[DataLoader]) -> list[list[int]] | None:
    """The step's sequences over all ranks."""
    steps = [loader.next_step() for loader in loaders]
    if any(step is None for step in steps):
        return None
    return [row for step in steps if step for batch in step.microbatches for row in batch.tokens.tolist()]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)])
def test_every_division_of_a_step_consumes_the_same_tokens(ranks: int, microbatches: int) -> None:
    one, many = loaders(1), loaders(ranks, microbatches)
    for _ in range(30):
        assert global_batch(one) == global_batch(many)
    close(one, many)


def test_a_shard_may_give_several_sequences_a_step() -> None:
    one, many = loaders(1, shards=2), loaders(2, microbatches=2, shards=2)
    for _ in range(30):
        assert global_batch(one) == global_batch(many)


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_goes_on_exactly_after_an_interruption_on_any_number_of_ranks(seed: int) -> None:
    generator = random.Random(seed)
    # One in five with worker processes, which take a moment to start.
    workers = 2 if seed % 5 == 0 else 0
    documents = MIXED if seed % 2 else MIXED[:1]

    def division() -> list[DataLoader]:
        ranks = generator.choice([1, 2, 4])
        accumulation = generator.choice([1, 2, 4]) if ranks < 4 else generator.choice([1, 2])
        return loaders_of(stream(*documents, plan=plan(ranks, accumulation)), workers=workers, document_mask=True)

    uninterrupted, first, second = loaders_of(stream(*documents, plan=plan(1))), division(), division()
    for _ in range(generator.randrange(40)):
        assert global_batch(uninterrupted) == global_batch(first)
    for loader in first:
        loader.peek()  # what was read ahead and not consumed is not lost
    state = merged(first)
    for loader in second:
        loader.load_state_dict(state)
    for _ in range(20):
        assert global_batch(uninterrupted) == global_batch(second)
    close(uninterrupted, first, second)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 1), (4, 2)])
def test_worker_processes_read_the_same_tokens(ranks: int, microbatches: int) -> None:
    one, many = loaders(1), loaders(ranks, microbatches, workers=2)
    for _ in range(30):
        assert global_batch(one) == global_batch(many)
    close(one, many)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 17), st.integers(0, 3),
       st.sampled_from([0, 1, 3, 100]))  # fmt: skip
def test_an_epoch_has_every_token_once(lengths: list[int], shards: int, window: int, seed: int, buffer: int) -> None:
    kind = "stream:" if buffer else ""
    spec = letters(kind + ",".join(map(str, lengths)), seed=seed)
    documents = spec.open.load()(spec.request)
    if buffer:
        documents = ShuffledStream(documents, buffer, seed)
    taken: list[int] = []
    for index in range(shards):
        texts = list(documents.shard(index, shards, 0))
        mine = [BYTE.encode_document(text).tolist() for text in texts if text]
        tokens = list(itertools.chain.from_iterable(mine))
        taken += tokens
        for on_end in ("stop", "once"):
            reader = DocumentReader(ReadPolicy(), "letters")
            source = TokenStream(documents, BYTE, index, shards, on_end, "letters", reader)
            if on_end == "stop" and texts and not any(texts):
                with pytest.raises(UserError, match=f"all {len(texts)} documents of logical shard {index} .* are empty"):
                    source.take(window)
                continue
            windows = [one.pieces for one in iter(lambda source=source: source.take(window), None)]
            given = list(itertools.chain.from_iterable(itertools.chain.from_iterable(windows)))
            assert given == (tokens if on_end == "once" else tokens[: len(tokens) // window * window])
            assert reader.empty == texts.count("")
    text = documents._source.letters.text if buffer else documents._documents.text
    filled = [index for index, length in enumerate(lengths) if length]
    everything = [token for index in filled for token in BYTE.encode_document(text(index)).tolist()]
    assert sorted(taken) == sorted(everything)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))
def test_a_mixture_loses_nothing_and_keeps_its_shares(weights: list[int], shards: int, seq_len: int) -> None:
    datasets = [letters(LENGTHS, f"dataset {number}", weight=weight) for number, weight in enumerate(weights)]
    spec = stream(*datasets, plan=plan(1, shards=shards, seq_len=seq_len))
    group = ShardGroup(spec, spec.open_sources(), BYTE, range(shards))
    steps = 30
    taken: dict[tuple[int, int], list[int]] = {}
    counts = [0] * len(weights)
    for _ in range(steps):
        rows = group.read()
        assert rows is not None
        for row, (tokens, dataset) in enumerate(zip(rows.tokens.tolist(), rows.datasets, strict=True)):
            taken.setdefault((row // (8 // shards), dataset), []).extend(tokens)
            counts[dataset] += 1
    for dataset, weight in enumerate(weights):
        assert abs(counts[dataset] - 8 * steps * weight / sum(weights)) < 6
    # Each logical shard reads of each dataset what it would read of it alone.
    for (shard, dataset), tokens in taken.items():
        alone = TokenStream(
            spec.open_sources()[dataset], BYTE, shard, shards, "repeat", "", DocumentReader(ReadPolicy(), "")
        )
        whole = alone.take(len(tokens))
        assert whole is not None
        assert [int(token) for piece in whole.pieces for token in piece] == tokens


def test_single_batches_are_mixed_well() -> None:
    mixture = Mixture([0.7, 0.2, 0.1], seed=3)
    for step in range(50):
        counts = [0, 0, 0]
        for place in range(64):
            counts[mixture.dataset_of(step * 64 + place)] += 1
        assert all(abs(count - 64 * share) < 3 for count, share in zip(counts, (0.7, 0.2, 0.1), strict=True))


def test_tokens_are_counted_by_dataset() -> None:
    (loader,) = loaders_of(stream(*MIXED, plan=plan(1)))
    steps = [loader.next_step() for _ in range(50)]
    totals = torch.tensor([step.targets_by_dataset for step in steps if step is not None]).sum(0)
    assert totals.sum() == 50 * 8 * 7
    assert totals[0] / totals.sum() == pytest.approx(0.75, abs=0.01)
    close([loader])


def test_documents_are_told_apart() -> None:
    """Positions and documents begin anew at each mark, and the last token of a document predicts nothing."""
    (loader,) = loaders_of(stream(letters(LENGTHS), plan=plan(1, seq_len=31)), document_mask=True)
    for _ in range(5):
        step = loader.next_step()
        assert step is not None
        (batch,) = step.microbatches
        assert batch.positions is not None
        assert batch.documents is not None
        begins = batch.tokens[:, 1:] == 256
        assert begins.any()
        assert ((batch.documents[:, 1:] != batch.documents[:, :-1]) == begins).all()
        assert (batch.positions[:, 1:][begins] == 0).all()
        assert (batch.positions[:, 1:][~begins] == batch.positions[:, :-1][~begins] + 1).all()
        assert ((batch.targets == IGNORE) == (batch.tokens == 257)).all()
        assert batch.num_targets() == step.num_targets()
    close([loader])


def test_read_once_every_token_is_a_target_once_however_ranks_end() -> None:
    spec = stream(letters(LENGTHS), plan=plan(4, seq_len=30), on_end="once")
    many = loaders_of(spec)
    seen: list[int] = []
    while True:
        steps = [loader.next_step() for loader in many]
        if all(step is None or step.ended for step in steps):
            break
        for step in steps:
            assert step is not None
            for batch in step.microbatches:
                assert ((batch.targets != IGNORE).sum(1) > 0).any() or step.num_targets() == 0
                seen += batch.targets[batch.targets != IGNORE].tolist()
    close(many)
    documents = spec.open_sources()[0]
    expected: list[int] = []
    for index in range(8):
        tokens = [token for text in documents.shard(index, 8, 0) for token in BYTE.encode_document(text).tolist()]
        expected += [token for start in range(0, len(tokens), 31) for token in tokens[start : start + 31][1:]]
    assert sorted(seen) == sorted(expected)


class Failing:
    """A shard whose reads fail as told: at the n-th read an error, once."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        self.errors, self.reads, self.next = errors, 0, 0
        self.broken = False

    def __iter__(self) -> Failing:
        return self

    def __next__(self) -> str:
        assert not self.broken, "read on after an error, without a position"
        self.reads += 1
        error = self.errors.pop(self.reads, None)
        if error is not None:
            self.broken = not isinstance(error, CorruptRecord)
            self.next += 1
            raise error
        if self.next >= 6:
            raise StopIteration
        self.next += 1
        return f"document {self.next - 1}"

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.broken = state["next"], False


def test_transient_errors_are_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    shard = Failing({2: ConnectionResetError("peer"), 3: TimeoutError(), 6: OSError(5, "Input/output error")})
    reader = DocumentReader(ReadPolicy(retries=2, first_wait=0.0), "letters")
    assert list(iter(lambda: reader.next(shard), None)) == [f"document {number}" for number in range(6)]
    assert "ConnectionResetError: peer; trying again" in caplog.text


def test_transient_errors_within_a_shuffled_buffer_are_tried_again() -> None:
    shard = BufferedShuffle(Failing({3: TimeoutError(), 4: TimeoutError(), 7: ConnectionResetError()}), 2, (0,))  # type: ignore[arg-type]
    reader = DocumentReader(ReadPolicy(retries=2, first_wait=0.0), "letters")
    assert sorted(iter(lambda: reader.next(shard), None)) == [f"document {number}" for number in range(6)]


def test_errors_of_the_hubs_client_are_transient() -> None:
    timeout = type("ReadTimeout", (type("HTTPError", (Exception,), {"__module__": "httpx2"}),), {"__module__": "elsewhere"})
    assert is_transient(timeout())
    assert not is_transient(type("Mine", (Exception,), {"__module__": "mine"})())


def test_a_worker_that_was_killed_is_one_clear_error() -> None:
    (loader,) = loaders(1, workers=1)
    others = multiprocessing.active_children()
    assert loader.next_step() is not None
    for process in multiprocessing.active_children():
        if process not in others:
            process.kill()
    with pytest.raises(UserError, match="a data worker: it ended unexpectedly"):
        list(iter(loader.next_step, None))
    close([loader])


def test_a_document_that_became_shorter_is_told() -> None:
    (loader,) = loaders_of(stream(letters("30,30"), plan=plan(1, global_size=1, shards=1)))
    loader.next_step()
    state = merged([loader])
    (other,) = loaders_of(stream(letters("30,30"), plan=plan(1, global_size=1, shards=1)))
    state["shards"]["0"]["streams"][0]["used"] = 40
    other.load_state_dict(state)
    with pytest.raises(UserError, match="the data has changed: of the document at the saved position 40 tokens were used"):
        other.next_step()
    close([loader], [other])


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), ZeroDivisionError()])
def test_other_errors_are_not(error: Exception) -> None:
    with pytest.raises(type(error)):
        DocumentReader(ReadPolicy(retries=2, first_wait=0.0), "letters").next(Failing({1: error}))


def test_a_source_that_stays_unreadable_is_one_clear_error() -> None:
    reader = DocumentReader(ReadPolicy(retries=2, first_wait=0.0), "letters")
    with pytest.raises(UserError, match="dataset 'letters': cannot be read, after 2 retries: TimeoutError: slow"):
        reader.next(Failing({number: TimeoutError("slow") for number in (1, 2, 3)}))


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_records_are_counted_and_skipped_or_end_the_job(workers: int) -> None:
    spec = stream(letters("3,!,5,!,2,9,4,4,7,7"), plan=plan(1, global_size=2, shards=2), on_corrupt="skip")
    (loader,) = loaders_of(spec, workers=workers)
    for _ in range(3):  # a good deal of the first epoch
        step = loader.next_step()
    assert step is not None
    assert step.corrupt == 2
    (strict,) = loaders_of(stream(letters("3,!,5,!,2,9,4,4,7,7"), plan=plan(1, global_size=2, shards=2)), workers=workers)
    with pytest.raises(UserError, match=r"letters:[13]: no letters; .*leave such records out with data.on_corrupt"):
        list(iter(strict.next_step, None))
    close([loader], [strict])


def test_a_streams_buffer_is_restored_exactly() -> None:
    spec = letters("stream:" + LENGTHS)
    source = ShuffledStream(spec.open.load()(spec.request), 7, seed=5)
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


def test_epochs_differ_in_order_and_agree_in_content() -> None:
    def order(seed: int, epoch: int) -> list[Any]:
        spec = letters(",".join(map(str, range(50))), seed=seed)
        return list(spec.open.load()(spec.request).shard(0, 1, epoch))

    assert order(0, 0) != order(0, 1)
    assert sorted(order(0, 0)) == sorted(order(0, 1))
    assert order(0, 0) != order(1, 0)


def test_a_dataset_that_ends_is_read_again_or_stops(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    repeating, stopping = loaders(1), loaders(1, on_end="stop")
    count = 0
    while (batch := global_batch(stopping)) is not None:
        assert batch == global_batch(repeating)
        count += 1
    assert 5 < count < 100
    for _ in range(count):
        assert global_batch(repeating) is not None
    assert "reading it again (epoch 2)" in caplog.text


def test_more_streams_than_documents_are_refused() -> None:
    with pytest.raises(UserError, match="it has 3 documents, fewer than the 8 streams"):
        stream(letters("1,2,3"), plan=plan(1)).open_sources()


def test_positions_in_another_stream_are_refused() -> None:
    state = merged(loaders(1))
    with pytest.raises(UserError, match=r"data\.logical_shards = 4: the saved position in the data was made with 8"):
        loaders(1, shards=4)[0].load_state_dict(state)
    (mixed,) = loaders_of(stream(*MIXED, plan=plan(1)))
    with pytest.raises(UserError, match=r"datasets = .*digits.* was made with"):
        mixed.load_state_dict(state)


CHANGES: dict[str, tuple[Any, str]] = {
    "seed": (lambda spec: replace(spec, seed=1), r"training\.seed = 1: .* made with 0"),
    "shards": (lambda spec: replace(spec, plan=plan(1, shards=4)), r"data\.logical_shards = 4: .* made with 8"),
    "buffer": (lambda spec: replace(spec, shuffle_buffer=9), r"data\.shuffle_buffer = 9: .* made with 5"),
    "no buffer": (lambda spec: replace(spec, shuffle_buffer=0), r"data\.shuffle_buffer = 0: .* made with 5"),
    "weight": (
        lambda spec: replace(spec, datasets=(letters(LENGTHS, weight=2.0),)),
        r"dataset 'letters': its weight = 2\.0: .* made with 1\.0",
    ),
    "path": (lambda spec: replace(spec, datasets=(letters(f"stream:{LENGTHS}"),)), r"its path = 'stream:.* made with"),
    "number": (lambda spec: replace(spec, datasets=(letters(f"{LENGTHS},1"),)), r"its path = "),
    "split": (
        lambda spec: replace(spec, datasets=(with_request(spec, split="train"),)),
        r"its split = 'train'.* made with None",
    ),
    "field": (
        lambda spec: replace(spec, datasets=(with_request(spec, text_field="body"),)),
        r"its text_field = 'body'.* made with 'text'",
    ),
    "format": (
        lambda spec: replace(spec, datasets=(with_request(spec, format="a:b"),)),
        r"its format = 'a:b'.* made with None|its text_field = None",
    ),
}


def with_request(spec: StreamSpec, **changes: Any) -> DatasetSpec:
    return replace(spec.datasets[0], request=replace(spec.datasets[0].request, **changes))


@pytest.mark.parametrize("change", CHANGES)
def test_a_position_means_something_in_its_own_stream_alone(change: str) -> None:
    """Each thing that decides the order of tokens is part of a stream's identity."""
    make, told = CHANGES[change]
    spec = stream(letters(LENGTHS), plan=plan(1), shuffle_buffer=5)
    (first,), (same,), (other,) = loaders_of(spec), loaders_of(replace(spec)), loaders_of(make(spec))
    state = merged([first])
    same.load_state_dict(state)
    with pytest.raises(UserError, match=told):
        other.load_state_dict(state)


def test_another_tokenizer_is_another_stream(tmp_path: Path) -> None:
    class Shifted:
        vocab_size = BYTE.vocab_size + 1

        def encode_document(self, text: str) -> Any:
            return BYTE.encode_document(text)

        decode = BYTE.decode

    spec = stream(letters(LENGTHS), plan=plan(1))
    state = merged(loaders_of(spec))
    other = DataLoader(spec, spec.open_sources(), Shifted(), 0)
    with pytest.raises(UserError, match=r"tokenizer = .* was made with"):
        other.load_state_dict(state)


def rows(*values: list[int]) -> Any:
    return numpy.array(values, numpy.uint32)


def test_targets_of_a_batch_are_the_next_tokens_of_each_row() -> None:
    batch = _batch(rows([1, 2, 3, 4], [5, 6, 7, 8]), [[4], [1, 3]], document_mask=False)
    assert batch.tokens.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert batch.targets.tolist() == [[2, 3, 4], [6, 7, 8]]
    assert batch.positions is None and batch.documents is None
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64


def test_with_documents_told_apart_the_last_of_each_predicts_nothing() -> None:
    batch = _batch(rows([1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]), [[2, 1, 3], [6]], document_mask=True)
    assert batch.targets.tolist() == [[2, IGNORE, IGNORE, 5, 6], [8, 9, 1, 2, 3]]
    assert batch.positions is not None and batch.documents is not None
    assert batch.positions.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    assert batch.documents.tolist() == [[0, 0, 1, 2, 2], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize(("pieces", "targets"), [([], 0), ([1], 0), ([2], 1), ([3], 2), ([4], 3)])
def test_what_a_short_row_lacks_is_no_target(document_mask: bool, pieces: list[int], targets: int) -> None:
    batch = _batch(rows([9, 8, 7, 6]), [pieces], document_mask)
    assert batch.targets.tolist() == [[8, 7, 6][:targets] + [IGNORE] * (3 - targets)]
    assert batch.num_targets() == targets


def test_a_batch_is_cut_into_microbatches_with_all_that_it_has() -> None:
    batch = _batch(rows(*([row, 1, 2, 3] for row in range(5))), [[4]] * 5, document_mask=True)
    cut = batch.split(2)
    assert [len(one.tokens) for one in cut] == [2, 2, 1]
    for name in ("tokens", "targets", "positions", "documents"):
        assert torch.equal(torch.cat([getattr(one, name) for one in cut]), getattr(batch, name))
    assert with_positions(replace(batch, positions=None)).positions is not None
    assert torch.equal(with_positions(batch).positions, batch.positions)  # type: ignore[arg-type]
    fresh = with_positions(replace(batch, positions=None)).positions
    assert fresh is not None and fresh.tolist() == [[0, 1, 2]] * 5


def test_an_order_of_an_epoch_is_divided_by_every_so_manieth() -> None:
    source: Any = ShuffledDocuments(Letters(["1"] * 20, 40), seed=3)
    order = numpy.random.Generator(numpy.random.Philox(key=[3, 2])).permutation(20).tolist()
    expected = [chr(40 + index) for index in order]
    assert list(source.shard(0, 1, 2)) == expected
    for shard in range(3):
        assert list(source.shard(shard, 3, 2)) == expected[shard::3]


def test_a_block_of_a_stream_is_shuffled_by_its_own_number() -> None:
    shard = BufferedShuffle(Failing({}), 4, (7, 1))  # type: ignore[arg-type]
    got = [int(text.removeprefix("document ")) for text in shard]  # type: ignore[union-attr]
    orders = [numpy.random.default_rng([7, 1, block]).permutation(size) for block, size in ((0, 4), (1, 2))]
    assert got == [*orders[0].tolist(), *(4 + orders[1]).tolist()]


def test_a_mixture_is_a_function_of_seed_and_number() -> None:
    one, same, other = (Mixture([1.0, 1.0], seed=seed) for seed in (3, 3, 4))
    numbers = range(1000)
    assert [one.dataset_of(number) for number in numbers] == [same.dataset_of(number) for number in reversed(numbers)][::-1]
    assert [one.dataset_of(number) for number in numbers] != [other.dataset_of(number) for number in numbers]
    assert {Mixture([0.0, 2.0, 0.0], 0).dataset_of(number) for number in numbers} == {1}
    # Weights need not sum to 1, and each dataset has its own share, not its neighbour's.
    counts = Counter(Mixture([10.0, 30.0, 60.0], 5).dataset_of(number) for number in numbers)
    assert [counts[dataset] / 1000 for dataset in range(3)] == pytest.approx([0.1, 0.3, 0.6], abs=0.005)


def test_a_stream_without_tokens_is_an_error_and_no_endless_loop() -> None:
    class Mute:
        vocab_size = 1

        def encode_document(self, text: str) -> list[int]:
            return []

        def decode(self, ids: object) -> str:
            return ""

    spec = letters("1,2")
    with pytest.raises(UserError, match="all 2 documents of logical shard 0 of 1 are empty"):
        TokenStream(
            spec.open.load()(spec.request), Mute(), 0, 1, "repeat", "letters", DocumentReader(ReadPolicy(), "letters")
        ).take(5)


def test_targets_are_the_next_tokens() -> None:
    (loader,) = loaders(1)
    step = loader.next_step()
    assert step is not None
    for batch in step.microbatches:
        assert batch.tokens[:, 1:].equal(batch.targets[:, :-1])
        assert batch.num_targets() == batch.targets.numel()


@pytest.mark.parametrize("workers", [0, 1])
def test_empty_documents_are_left_out_and_counted(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    (loader,) = loaders_of(
        stream(letters("3,0,5,0,2,9"), plan=plan(1, global_size=1, shards=1, seq_len=10)), workers=workers
    )
    seen: list[int] = []
    for _ in range(4):  # more than an epoch of 27 tokens, less than two
        step = loader.next_step()
        assert step is not None
        seen += step.microbatches[0].tokens[0].tolist()
    loader.close()
    assert (256, 257) not in set(itertools.pairwise(seen))
    assert 2 <= step.empty <= 4
    if not workers:  # whose log is theirs
        assert "dataset 'letters': documents without text are left out; so far 1" in caplog.text


@pytest.mark.parametrize("on_end", ["repeat", "stop"])
def test_a_dataset_of_empty_documents_is_refused(on_end: str) -> None:
    (loader,) = loaders_of(stream(letters("0,0,0,0"), plan=plan(1, global_size=2, shards=2), on_end=on_end))
    with pytest.raises(
        UserError, match=r"dataset 'letters': all 2 documents of logical shard 0 of 2 are empty; check data.tex"
    ):
        loader.next_step()
    loader.close()


class OneToken:
    """A dataset of documents that are one token each, with no mark of their own."""

    num_documents = None

    def shard(self, index: int, count: int, epoch: int) -> Any:
        return self

    def __next__(self) -> Any:
        return numpy.array([65])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_sequences_without_a_target_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    spec = stream(letters("30,40,50,60"), letters("1", "single"), plan=plan(1, global_size=4, shards=1))
    for document_mask in (False, True):
        sources: Any = [spec.datasets[0].open.load()(spec.datasets[0].request), OneToken()]
        loader = DataLoader(spec, sources, BYTE, 0, document_mask=document_mask)
        step = loader.next_step()
        assert step is not None
        loader.close()
        assert step.targets_by_dataset == [14, 0 if document_mask else 14]
        told = "dataset 'single': a sequence has no token to train on: each of its documents is one token"
        assert caplog.text.count(told) == document_mask  # once, not for each sequence
