"""The token stream: nothing lost, nothing twice, the same on any number of ranks, and restored exactly."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_core.config.config import Config
from titan_core.config.sections import DataSection, TrainingSection
from titan_core.data.huggingface import StreamedDocuments
from titan_core.data.loader import DataLoader, require_documents
from titan_core.data.local_files import check_files
from titan_core.data.shuffled import ShuffledDocuments
from titan_core.data.source import DatasetRequest, DocumentSource
from titan_core.data.stdlib import open_stdlib
from titan_core.data.text_files import PIECE, open_text
from titan_core.data.tokens import TokenStream
from titan_core.errors import UserError
from titan_core.job.batch_plan import BatchPlan
from titan_core.tokenizers.tiktoken_tokenizer import build_byte

BYTE = build_byte(None)


class Letters:
    """Document ``i`` is ``lengths[i]`` times a character of its own."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def text(self, index: int) -> str:
        return chr(33 + index % 90) * self.lengths[index]


def source(lengths: list[int], seed: int = 0) -> DocumentSource:
    return ShuffledDocuments(Letters(lengths), seed)


def plan(ranks: int, microbatches: int, global_size: int = 8, shards: int = 8, seq_len: int = 7) -> BatchPlan:
    return BatchPlan(global_size, global_size // ranks // microbatches, microbatches, ranks, shards, seq_len)


def loaders(ranks: int, microbatches: int = 1, seed: int = 0, **keywords: Any) -> list[DataLoader]:
    lengths = [1 + index * 7 % 23 for index in range(100)]
    config = config_with(keywords.pop("on_end", "repeat"))
    shape = plan(ranks, microbatches, **keywords)
    return [DataLoader(source(lengths, seed), BYTE, shape, config, rank) for rank in range(ranks)]


def config_with(on_end: str = "repeat") -> Config:
    sections = {
        TrainingSection: TrainingSection(dataset="letters"),
        DataSection: DataSection(on_end=on_end),  # type: ignore[arg-type]
    }
    return Config("test", sections)


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


def test_a_shard_may_give_several_sequences_a_step() -> None:
    one, many = loaders(1, shards=2), loaders(2, microbatches=2, shards=2)
    for _ in range(30):
        assert global_batch(one) == global_batch(many)


@pytest.mark.parametrize("seed", range(20))
def test_a_restored_stream_goes_on_exactly_on_any_number_of_ranks(seed: int) -> None:
    generator = random.Random(seed)
    before, after = generator.choice([1, 2, 4, 8]), generator.choice([1, 2, 4, 8])
    uninterrupted, first = loaders(1), loaders(before)
    for _ in range(generator.randrange(40)):
        assert global_batch(uninterrupted) == global_batch(first)
    for loader in first:
        loader.peek()  # what was read ahead and not consumed is not lost
    state = merged(first)
    second = loaders(after)
    for loader in second:
        loader.load_state_dict(state)
    for _ in range(20):
        assert global_batch(uninterrupted) == global_batch(second)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 17), st.integers(0, 3))
def test_an_epoch_has_every_token_once(lengths: list[int], shards: int, window: int, seed: int) -> None:
    documents = source(lengths, seed)
    taken: list[int] = []
    for index in range(shards):
        stream = TokenStream(documents, BYTE, index, shards, "stop", "letters")
        windows = list(iter(lambda stream=stream: stream.take(window), None))
        mine = [BYTE.encode_document(text) for text in documents.shard(index, shards, 0)]
        tokens = list(itertools.chain.from_iterable(mine))
        taken += tokens
        assert list(itertools.chain.from_iterable(windows)) == tokens[: len(tokens) // window * window]
    everything = [token for index in range(len(lengths)) for token in BYTE.encode_document(Letters(lengths).text(index))]
    assert sorted(taken) == sorted(everything)


def test_epochs_differ_in_order_and_agree_in_content() -> None:
    documents = source(list(range(50)))
    first, second = list(documents.shard(0, 1, 0)), list(documents.shard(0, 1, 1))
    assert first != second
    assert sorted(first) == sorted(second)
    assert first != list(source(list(range(50)), seed=1).shard(0, 1, 0))


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
        require_documents(source([1, 2, 3]), plan(1, 1), "letters")


def test_positions_in_another_stream_are_refused() -> None:
    state = merged(loaders(1))
    with pytest.raises(UserError, match=r"data\.logical_shards = 4: the saved position in the data was made with 8"):
        loaders(1, shards=4)[0].load_state_dict(state)


def test_a_stream_without_tokens_is_an_error_and_no_endless_loop() -> None:
    class Mute:
        vocab_size = 1

        def encode_document(self, text: str) -> list[int]:
            return []

        def decode(self, ids: object) -> str:
            return ""

    with pytest.raises(UserError, match="logical shard 0 of 1 has no tokens"):
        TokenStream(source([1, 2]), Mute(), 0, 1, "repeat", "letters").take(5)


def test_targets_are_the_next_tokens() -> None:
    (loader,) = loaders(1)
    step = loader.next_step()
    assert step is not None
    for batch in step.microbatches:
        assert batch.tokens[:, 1:].equal(batch.targets[:, :-1])
        assert batch.num_targets() == batch.targets.numel()


def request(name: str, path: Path | None, field: str = "text") -> DatasetRequest:
    return DatasetRequest(name, None if path is None else str(path), field, 0, "recipe: training.dataset_path")


def test_the_standard_library_is_a_corpus() -> None:
    texts = list(itertools.islice(open_stdlib(request("stdlib", None)).shard(0, 4, 0), 5))
    assert len(texts) == 5
    assert sum("import" in text for text in texts) >= 3


def test_text_files_are_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    lines = "".join(f"line {number} ü\n" for number in range(20_000))
    (tmp_path / "a.txt").write_text(lines)
    (tmp_path / "b.md").write_text("no newline at the end")
    (tmp_path / "c.bin").write_text("not text")
    pieces = list(open_text(request("text", tmp_path)).shard(0, 1, 0))
    assert len(pieces) == 2 + len(lines.encode()) // PIECE
    assert sum(map(len, pieces)) == len(lines) + 21
    assert all(piece.endswith("\n") for piece in pieces if "line" in piece and piece != "no newline at the end")


def test_bytes_that_are_no_text_are_an_error_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\n\xff\xfe")
    with pytest.raises(UserError, match=r"a\.txt: not UTF-8 text: invalid start byte at byte 5"):
        list(open_text(request("text", tmp_path)).shard(0, 1, 0))


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_local_records(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    from titan_core.data.huggingface import open_local

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [f"document {number}" for number in range(10)]
    if kind == "json":
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in texts))
    else:
        path = tmp_path / "data.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"body": texts}), path)
    assert check_files(request(kind, path, "body")) == []
    (problem,) = check_files(request(kind, path))
    assert "no field 'text'; there is body" in str(problem)
    documents = open_local(request(kind, path, "body"))
    assert documents.num_documents == 10
    assert sorted(text for index in range(3) for text in documents.shard(index, 3, 0)) == sorted(texts)


@pytest.mark.parametrize("files", [1, 2, 3, 8])
@pytest.mark.parametrize("shards", [1, 2, 4, 6])
def test_a_stream_is_divided_by_files_and_then_by_documents(tmp_path: Path, files: int, shards: int) -> None:
    import datasets

    datasets.disable_progress_bars()
    for file in range(files):
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps({"text": f"{file}-{i}"}) + "\n" for i in range(12)))
    stream = datasets.load_dataset("json", data_files=str(tmp_path / "*.jsonl"), split="train", streaming=True)
    documents = StreamedDocuments(stream, request("hub", tmp_path))
    parts = [list(documents.shard(index, shards, 0)) for index in range(shards)]
    assert sorted(itertools.chain(*parts)) == sorted(f"{file}-{i}" for file in range(files) for i in range(12))
    assert max(map(len, parts)) - min(map(len, parts)) <= 12
    for index in range(shards):  # resumed in the middle
        shard = documents.shard(index, shards, 0)
        done = list(itertools.islice(shard, 2))
        other = documents.shard(index, shards, 0)
        other.load_state_dict(json.loads(json.dumps(shard.state_dict())))
        third = documents.shard(index, shards, 0)
        third.load_state_dict(json.loads(json.dumps(other.state_dict())))  # saved again before anything was read
        assert [*done, *other] == parts[index]
        assert [*done, *third] == parts[index]


def test_no_network_is_one_clear_line() -> None:
    from titan_core.data.huggingface import open_hub

    with pytest.raises(UserError, match="cannot be opened on the hub"):
        open_hub(request("c4", None))
