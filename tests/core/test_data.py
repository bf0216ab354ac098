"""The token stream: no token lost or repeated, independent of the number of ranks, restored exactly."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from hypothesis import given, settings, strategies as st

from harness.letters import BYTE, letters, stream
from harness.loaders import LENGTHS, MIXED, close, global_batch, loaders, loaders_of, merged, plan
from titan_core.api import UserError
from titan_core.api.data.dataset import ReadPolicy
from titan_core.api.training.batch import IGNORE
from titan_core.data.buffered_shuffle import ShuffledStream
from titan_core.data.loader import DataLoader
from titan_core.data.shards import ShardGroup
from titan_core.data.streams import open_sources
from titan_core.data.tokens import TokenStream
from titan_core.toolkit.reading import DocumentReader


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)])
def test_every_division_of_a_step_consumes_the_same_tokens(ranks: int, microbatches: int) -> None:
    one, many = loaders(1), loaders(ranks, microbatches)
    for _ in range(30):
        assert global_batch(one) == global_batch(many)
    close(one, many)


def test_a_shard_may_provide_several_sequences_per_step() -> None:
    one, many = loaders(1, shards=2), loaders(2, microbatches=2, shards=2)
    for _ in range(30):
        assert global_batch(one) == global_batch(many)
    close(one, many)


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.full) if seed in (5, 10, 15) else seed for seed in range(20)]
)
def test_a_stream_resumes_exactly_after_an_interruption_on_any_number_of_ranks(seed: int) -> None:
    generator = random.Random(seed)
    # Every fifth case with worker processes, which are slow to start.
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
        loader.peek()  # data that was read ahead but not consumed must not be lost
    state = merged(first)
    for loader in second:
        loader.load_state_dict(state)
    for _ in range(20):
        assert global_batch(uninterrupted) == global_batch(second)
    close(uninterrupted, first, second)


@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    [pytest.param(1, 4, marks=pytest.mark.full), (2, 1), pytest.param(4, 2, marks=pytest.mark.full)],
)
def test_worker_processes_read_the_same_tokens(ranks: int, microbatches: int) -> None:
    one, many = loaders(1), loaders(ranks, microbatches, workers=2)
    for _ in range(30):
        assert global_batch(one) == global_batch(many)
    close(one, many)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 17), st.integers(0, 3),
       st.sampled_from([0, 1, 3, 100]))  # fmt: skip
def test_an_epoch_has_every_token_once(lengths: list[int], shards: int, window: int, seed: int, buffer: int) -> None:
    kind = "stream:" if buffer else ""
    spec = letters(kind + ",".join(map(str, lengths)), seed=seed)
    documents = spec.build.load()(spec.context)
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
            windows = [window_taken.pieces for window_taken in iter(lambda source=source: source.take(window), None)]
            given = list(itertools.chain.from_iterable(itertools.chain.from_iterable(windows)))
            assert given == (tokens if on_end == "once" else tokens[: len(tokens) // window * window])
            assert reader.empty == texts.count("")
    text = documents._source.letters.text if buffer else documents._documents.text
    filled = [index for index, length in enumerate(lengths) if length]
    everything = [token for index in filled for token in BYTE.encode_document(text(index)).tolist()]
    assert sorted(taken) == sorted(everything)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))
def test_a_mixture_loses_nothing_and_keeps_its_shares(weights: list[int], shards: int, seq_len: int) -> None:
    datasets = [letters(LENGTHS, f"dataset {number}", weight=weight) for number, weight in enumerate(weights)]
    spec = stream(*datasets, plan=plan(1, shards=shards, seq_len=seq_len))
    group = ShardGroup(spec, open_sources(spec), BYTE, range(shards))
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
    # Each logical shard reads from each dataset as if it were the only one.
    for (shard, dataset), tokens in taken.items():
        alone = TokenStream(open_sources(spec)[dataset], BYTE, shard, shards, "repeat", "", DocumentReader(ReadPolicy(), ""))
        whole = alone.take(len(tokens))
        assert whole is not None
        assert [int(token) for piece in whole.pieces for token in piece] == tokens


def test_tokens_are_counted_by_dataset() -> None:
    (loader,) = loaders_of(stream(*MIXED, plan=plan(1)))
    steps = [loader.next_step() for _ in range(50)]
    totals = torch.tensor([step.targets_by_dataset for step in steps if step is not None]).sum(0)
    assert totals.sum() == 50 * 8 * 7
    assert totals[0] / totals.sum() == pytest.approx(0.75, abs=0.01)
    close([loader])


def test_data_read_once_has_every_token_as_target_once() -> None:
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
                assert ((batch.targets != IGNORE).sum(1) > 0).any() or step.target_weight == 0
                seen += batch.targets[batch.targets != IGNORE].tolist()
    close(many)
    documents = open_sources(spec)[0]
    expected: list[int] = []
    for index in range(8):
        tokens = [token for text in documents.shard(index, 8, 0) for token in BYTE.encode_document(text).tolist()]
        expected += [token for start in range(0, len(tokens), 31) for token in tokens[start : start + 31][1:]]
    assert sorted(seen) == sorted(expected)


def test_a_dataset_that_ends_is_read_again_or_stops(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    repeating, stopping = loaders(1), loaders(1, on_end="stop")
    count = 0
    while (batch := global_batch(stopping)) is not None:
        assert batch == global_batch(repeating)
        count += 1
    assert 5 < count < 100
    for _ in range(4 * count):
        assert global_batch(repeating) is not None
    # Not at each end: a small dataset may end in each step.
    assert re.findall(r"reading it again \(epoch (\d+)\)", caplog.text) == ["2", "4"]
    close(repeating, stopping)


def test_more_streams_than_documents_are_refused() -> None:
    with pytest.raises(UserError, match="has 3 documents, fewer than the 8 logical shards"):
        open_sources(stream(letters("1,2,3"), plan=plan(1)))
