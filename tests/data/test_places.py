"""Each kind of data in docs/data/kinds.md says where its documents are, finds them there, and reads them there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.kinds_of_data import KINDS
from harness.quick import rows
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.data.replay import Replay
from titan_core.data.streams import open_sources
from titan_core.toolkit.reading import place_of
from titan_data.places import file_at, parse_place
from titan_testing.jobs import make_job

TINY: dict[str, object] = {
    "model.args": "{dim = 16, n_layers = 1, n_heads = 1, n_kv_heads = 1, ffn_dim = 16}", "training.seq_len": 128,
    "training.local_batch_size": 4, "training.global_batch_size": 4, "training.steps": 1, "job.device": "cpu",
}  # fmt: skip
QUICK = ("JSON lines", "a JSON array", "CSV", "Parquet, several row groups, zstd", "text files", "nanoGPT", "Megatron-LM")


@pytest.fixture(autouse=True)
def cache(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(in_tmp / "cache"))


def job_of(kind: str, folder: Path, **more: object) -> AssembledJob:
    made = {key: value for key, value in KINDS[kind](folder).items() if value != ""}
    if "data.mixture" in made:
        del made["training.dataset"]
    return make_job("tiny", {**TINY, **made, **{key.replace("__", "."): value for key, value in more.items()}})


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("kind", rows(KINDS, QUICK))
def test_a_document_is_found_where_it_is_said_to_be(kind: str, in_tmp: Path) -> None:
    job = job_of(kind, in_tmp)
    sources, shards = open_sources(job.data), job.data.plan.logical_shards
    for source in sources:
        found: Any = source
        seen: dict[str, tuple[int, int | None]] = {}
        for shard in range(shards):
            reader = source.shard(shard, shards, 1)
            assert place_of(reader) is None
            for _ in reader:
                place = place_of(reader)
                assert place is not None and place.text not in seen
                assert found.find(place.text, shards) == place
                assert found.position(place.index, shards, 1)[0] == shard
                seen[place.text] = shard, place.index
        assert len(seen) > 3
    replay = Replay(job.data, sources, job.text_tokenizer)
    step = next(replay.read(range(shards)))
    assert all(one.document.place is not None for used in step.used for one in used)


def test_a_position_of_a_place_is_that_of_the_shard(in_tmp: Path) -> None:
    job = job_of("JSON lines", in_tmp, data__shuffle="blocks")
    (source,) = open_sources(job.data)
    found: Any = source
    for epoch in range(3):
        for shard in range(4):
            reader = source.shard(shard, 4, epoch)
            for _ in reader:
                place = place_of(reader)
                assert place is not None
                assert found.position(place.index, 4, epoch) == (shard, reader.state_dict()["next"] - 1)


def test_a_line_of_a_text_file_is_found_in_its_piece(in_tmp: Path) -> None:
    text = "".join(f"line {number} of a book\n" for number in range(6000))
    (in_tmp / "book.txt").write_text(text)
    job = make_job("tiny", {**TINY, "training.dataset": "text", "training.dataset_path": "book.txt"})
    (source,) = open_sources(job.data)
    found: Any = source
    firsts = sorted(int(place.rpartition(" ")[2]) for place in places_of(source))
    assert firsts[0] == 0 and len(firsts) >= 4
    lines = text.splitlines(keepends=True)
    for number in (1, 2, 1500, 3000, 6000):
        byte = len("".join(lines[: number - 1]))
        expected = max(first for first in firsts if first <= byte)
        assert found.find(f"book.txt:{number}", 4).text == f"book.txt, byte {expected}"
        assert found.find(f"book.txt, byte {byte}", 4).text == f"book.txt, byte {expected}"
    for place in places_of(source):
        assert text[int(place.rpartition(" ")[2]) - 1] == "\n" or place.endswith(" 0")


def places_of(source: Any) -> list[str]:
    return [place_of(reader).text for shard in range(4) for reader in [source.shard(shard, 4, 0)] for _ in reader]  # type: ignore[union-attr]


def test_a_place_names_a_file_by_its_path_or_the_end_of_it(in_tmp: Path) -> None:
    files = ["data/a.jsonl", str(in_tmp / "other/a.jsonl"), "data/b.jsonl"]
    assert file_at("data/a.jsonl", files) == 0 and file_at(str(in_tmp / "data/a.jsonl"), files) == 0
    assert file_at("other/a.jsonl", files) == 1 and file_at("b.jsonl", files) == 2
    assert file_at("a.jsonl", files) is None  # of two
    assert file_at("c.jsonl", files) is None and file_at(".jsonl", files) is None
    assert file_at("b.jsonl", ["data/ab.jsonl"]) is None


@pytest.mark.parametrize(
    "text", ["", "a.jsonl", "a.jsonl:", "a.jsonl:x", ":3", "a.jsonl, line", "a.jsonl:-1", f"a:{10**30}"]
)
def test_what_is_no_place(text: str) -> None:
    assert parse_place(text) is None


def test_places_are_parsed() -> None:
    for text, expected in (
        ("s3://bucket/a.jsonl:12", ("s3://bucket/a.jsonl", 12, True)),
        ("a:3:4", ("a:3", 4, True)),
        ("a b.parquet, row 7", ("a b.parquet", 7, False)),
    ):
        place = parse_place(text)
        assert place is not None and (place.file, place.number, place.is_line) == expected
