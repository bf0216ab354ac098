"""Datasets in an object store: the same documents as from files, with ranged reads, after faults, and without secrets."""

from __future__ import annotations

import gzip
import io
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy
import pytest

from harness.fake_s3 import BUCKET, KEY, SECRET, FakeS3, running, use
from harness.letters import BYTE, letters, stream
from harness.loaders import close, global_batch, plan
from harness.quick import rows
from titan_core.api import DatasetContext, Ref, UserError
from titan_core.api.data.dataset import DatasetSpec
from titan_core.data.loader import DataLoader
from titan_core.data.streams import open_sources
from titan_data import remote_bytes
from titan_data.engines import LocalEngine
from titan_data.foreign.config import FlatTokensSection, MdsSection
from titan_data.mapped_files import MappedFiles
from titan_data.record_files import open_local
from titan_data.remote_bytes import BLOCK, FetchedBlocks, RemoteArray, RemoteBytes
from titan_data.storage import files_below, kind_of, located, matching
from titan_data.tokenize import tokenize

FULL = pytest.mark.full
FOREIGN = Path(__file__).parent / "foreign"
COUNT = 2_000_000
TEXTS = [f"document {number} " + "of words " * (number * 7 % 5) for number in range(60)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
RECORDS = "titan_data.record_files:open_local"


def written(texts: list[str], form: str) -> bytes:
    """Return a file of Parquet or Arrow with groups of seven rows."""
    import pyarrow
    import pyarrow.parquet

    table, stream = pyarrow.table({"id": list(range(len(texts))), "text": texts}), io.BytesIO()
    if form == "parquet":
        pyarrow.parquet.write_table(table, stream, row_group_size=7)
    else:
        with (pyarrow.ipc.new_file if form == "file" else pyarrow.ipc.new_stream)(stream, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return stream.getvalue()


TEXT = {
    "json": (".jsonl", LINES, RECORDS),
    "json, compressed": (".jsonl.gz", gzip.compress(LINES), RECORDS),
    "csv": (".csv", b"text\n" + "".join(f"{text}\n" for text in TEXTS).encode(), "titan_data.csv_files:open_csv"),
    "text": (".txt", "\n".join(TEXTS).encode(), "titan_data.text_files:open_text"),
    "json, an array": (".json", json.dumps([{"text": text} for text in TEXTS]).encode(), RECORDS),
    "parquet": (".parquet", written(TEXTS, "parquet"), RECORDS),
    "arrow": (".arrow", written(TEXTS, "file"), RECORDS),
    "arrow, a stream": (".arrow", written(TEXTS, "stream"), RECORDS),
}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeS3]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with running() as fake:
        yield fake


@pytest.fixture
def s3(server: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeS3]:
    use(server, monkeypatch, tmp_path / "cache")
    server.seconds, server.errors, server.cuts, server.expired = 0.0, 0, 0, False
    server.ranges.clear()
    yield server
    remote_bytes._threads().shutdown()
    remote_bytes._threads.cache_clear()


def numbers(s3: FakeS3, tmp_path: Path) -> Path:
    (tmp_path / "numbers").mkdir()
    numpy.arange(COUNT, dtype="<u4").tofile(tmp_path / "numbers" / "a.bin")
    s3.put(tmp_path / "numbers", "numbers/")
    return located(f"s3://{BUCKET}/numbers/a.bin", "training.dataset_path")


def dataset(kind: str, folder: Path) -> DatasetSpec:
    """Write a dataset, and return it."""
    section: Any = None
    if kind == "tokenized":
        source = stream(letters(",".join(str(3 + number * 7 % 40) for number in range(40))), plan=plan(1))
        list(tokenize(source, source.datasets[0], "byte", folder / "set", 2, LocalEngine(1)))
        path, build = folder / "set", "titan_data.tokenized:open_tokenized"
    elif kind in TEXT:
        (folder / "set").mkdir()
        ending, content, build = TEXT[kind]
        path = folder / "set"
        (path / f"a{ending}").write_bytes(content)
    else:
        (folder / "set").mkdir()
        for file in FOREIGN.glob(f"{kind}_uint16*"):
            shutil.copy(file, folder / "set")
        path, build = folder / "set", "titan_data.foreign.formats:open_tokens"
    if kind.startswith("mds"):
        shutil.copytree(FOREIGN / ("mds_int32" if kind == "mds" else "mds_gz"), path, dirs_exist_ok=True)
        section = MdsSection()
    if kind == "flat_tokens":
        ids = [number % 250 if number % 30 else 257 for number in range(100_000)]
        numpy.array(ids, "<u2").tofile(path / "train.bin")
        section = FlatTokensSection(dtype="uint16", end_token_id=257)
    return DatasetSpec(kind, 1.0, Ref(build), context(kind.partition(",")[0], str(path), section))


def context(kind: str, path: str, section: Any = None) -> DatasetContext[Any]:
    return DatasetContext(kind, path, "text", 0, "training.dataset_path", section=section, vocab_size=258)


def at_store(spec: DatasetSpec, s3: FakeS3, prefix: str) -> DatasetSpec:
    s3.put(Path(spec.context.path or ""), f"{prefix}/")
    return DatasetSpec(
        spec.name, 1.0, spec.build, context(spec.context.name, f"s3://{BUCKET}/{prefix}", spec.context.section)
    )


def batches(spec: DatasetSpec, number: int) -> list[Any]:
    asked = stream(spec, plan=plan(1, global_size=4, shards=4, seq_len=39))
    loader = [DataLoader(asked, open_sources(asked), BYTE, 0)]
    try:
        return [global_batch(loader) for _ in range(number)]
    finally:
        close(loader)


@pytest.mark.parametrize(
    "kind",
    rows(
        ["tokenized", "megatron", "datatrove", "flat_tokens", "mds", "mds, compressed", *TEXT],
        quick=("tokenized", "flat_tokens", "mds", "csv", "parquet"),
    ),
)
def test_the_documents_are_those_of_files(kind: str, s3: FakeS3, tmp_path: Path) -> None:
    here = dataset(kind, tmp_path)
    there = at_store(here, s3, kind.replace(", ", "-"))
    s3.errors, s3.cuts = 2, 1  # what the stores' own libraries and the reader repeat
    assert batches(there, 6) == batches(here, 6)
    assert s3.ranges and all(span for path, span in s3.ranges if path.endswith((".bin", ".ds"))), "data is read by range"


@pytest.mark.parametrize(
    "kind",
    [
        "flat_tokens",
        "json",
        *(pytest.param(kind, marks=FULL) for kind in ("tokenized", "megatron", "datatrove", "mds", "csv", "text")),
    ],
)
def test_blocks_of_documents_are_fetched_once(
    kind: str, s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_bytes, "BLOCK", 1024)
    there = at_store(dataset(kind, tmp_path), s3, f"{kind}-blocks")
    in_blocks = replace(there.context, shuffle="blocks")
    source = there.build.load()(in_blocks)
    s3.ranges.clear()
    documents = list(source.shard(0, 1, 0))
    assert len(documents) > 0
    spans = [span for path, span in s3.ranges if not path.endswith((".idx", ".index", ".json"))]
    fetched = sum(last + 1 - first for first, last in (map(int, span.removeprefix("bytes=").split("-")) for span in spans))
    files = [file.stat().st_size for file in (tmp_path / "set").iterdir() if file.suffix not in (".idx", ".index", ".json")]
    assert len(spans) == len(set(spans)) or kind == "mds"
    if kind != "mds":  # whose shards begin with their own index
        assert fetched <= sum(files) + 1, "each byte is fetched once"
    if kind == "flat_tokens":
        assert len(spans) <= 64 * (-(-sum(files) // 64 // 1024) + 1), "64 blocks, in requests of a KiB"


def test_names_and_kinds(s3: FakeS3, tmp_path: Path) -> None:
    for name in ("train/a.jsonl", "train/b.jsonl", "c.txt"):
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_text("x")
    s3.put(tmp_path / "files", "names/")
    root = located(f"s3://{BUCKET}/names", "here")
    assert sorted(str(file) for file in files_below(root)) == [
        f"s3://{BUCKET}/names/{name}" for name in ("c.txt", "train/a.jsonl", "train/b.jsonl")
    ]
    assert [file.name for file in matching(located(f"s3://{BUCKET}/names/*/a.*", "here"))] == ["a.jsonl"]
    assert [kind_of(path) for path in (root, root / "c.txt", root / "none")] == ["folder", "file", None]


def test_readings_that_are_near_each_other_share_a_request(s3: FakeS3, tmp_path: Path) -> None:
    array = RemoteArray(RemoteBytes(numbers(s3, tmp_path), FetchedBlocks()), "<u4")
    assert array[5:8].tolist() == [5, 6, 7] and array[-1] == COUNT - 1 and len(array) == COUNT
    assert [span for _, span in s3.ranges] == ["bytes=20-31", f"bytes={4 * COUNT - 4}-{4 * COUNT - 1}"]
    s3.ranges.clear()
    whole = numpy.concatenate([array[at : at + 1000] for at in range(0, COUNT, 1000)])
    assert (whole == numpy.arange(COUNT)).all()
    assert len(s3.ranges) <= 4 * COUNT // BLOCK + 3


def test_few_blocks_are_kept(s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_bytes, "_KEPT", 6)
    blocks = FetchedBlocks()
    array = RemoteArray(RemoteBytes(numbers(s3, tmp_path), blocks), "<u4")
    for at in range(0, COUNT, 50_000):
        array[at : at + 10], array[at + 10 : at + 20]
    assert len(blocks._blocks) == 6


def test_an_index_is_copied_once(s3: FakeS3, tmp_path: Path) -> None:
    file = numbers(s3, tmp_path)
    for _ in range(2):
        assert MappedFiles().index(file, "<u4")[[3, -1]].tolist() == [3, COUNT - 1]
    assert len(s3.ranges) == 1
    (copy,) = (one for one in (tmp_path / "cache" / "remote").iterdir() if not one.name.startswith("."))
    assert copy.stat().st_size == 4 * COUNT


def test_expired_credentials_are_one_error_without_them(
    s3: FakeS3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = at_store(dataset("megatron", tmp_path), s3, "expired")
    s3.expired = True
    with pytest.raises((UserError, PermissionError)) as caught:
        batches(spec, 1)
    text = f"{caught.value} {caplog.text}"
    assert "expired" in text and SECRET not in text and KEY not in text


def test_a_store_that_stays_broken_is_reported(s3: FakeS3, tmp_path: Path) -> None:
    array = RemoteArray(RemoteBytes(numbers(s3, tmp_path), FetchedBlocks()), "<u4")
    s3.cuts = 1000
    with pytest.raises(OSError, match=r"bytes arrived instead of|payload|closed|Incomplete|Broken"):
        array[0:9]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ftp://host/file", r"ftp:// is no store that titan-data reads; name a path, or one of s3://"),
        ("s3://key:secret@bucket/file", r"the path contains credentials.*set them in the environment"),
        ("s3://", r"'s3://' names no file or folder; write s3://BUCKET/PATH"),
    ],
)
def test_paths_that_are_refused(path: str, message: str) -> None:
    with pytest.raises(UserError, match=f"training.dataset_path: {message}") as caught:
        located(path, "training.dataset_path")
    assert "secret" not in str(caught.value)


def test_only_the_column_chunks_that_are_used_are_fetched(s3: FakeS3, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    noise = [numpy.random.default_rng(number).bytes(50_000) for number in range(60)]
    (tmp_path / "set").mkdir()
    table = pyarrow.table({"noise": noise, "text": TEXTS, "more": noise})
    pyarrow.parquet.write_table(table, tmp_path / "set" / "a.parquet", row_group_size=20, compression="none")
    s3.put(tmp_path / "set", "columns/")
    source = open_local(context("parquet", f"s3://{BUCKET}/columns"))
    s3.ranges.clear()
    assert sorted(source.shard(0, 1, 0)) == sorted(TEXTS)  # type: ignore[type-var]
    spans = [[int(number) for number in span.removeprefix("bytes=").split("-")] for _, span in s3.ranges]
    assert sum(end - begin + 1 for begin, end in spans) < 100_000, "of six million"
    assert len(spans) <= 4, "the column chunk of each of three row groups"


@pytest.mark.full
def test_blocks_of_row_groups_are_fetched_once(s3: FakeS3, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = [numpy.random.default_rng(number).bytes(500).hex() for number in range(4000)]
    (tmp_path / "set").mkdir()
    table = pyarrow.table({"text": texts, "id": list(range(4000))})
    pyarrow.parquet.write_table(table, tmp_path / "set" / "a.parquet", row_group_size=250, compression="none")
    s3.put(tmp_path / "set", "blocks/")
    source = open_local(replace(context("parquet", f"s3://{BUCKET}/blocks"), shuffle="blocks"))
    s3.ranges.clear()
    shards = [source.shard(index, 2, 0) for index in range(2)]
    found = [text for pair in zip_longest(*shards) for text in pair if text is not None]
    assert sorted(found) == sorted(texts)
    spans = [[int(number) for number in span.removeprefix("bytes=").split("-")] for _, span in s3.ranges]
    assert sum(end - begin + 1 for begin, end in spans) < 1.1 * 4000 * 1004


def test_a_broken_store_does_not_make_a_file_damaged(s3: FakeS3, tmp_path: Path) -> None:
    there = at_store(dataset("parquet", tmp_path), s3, "cut")
    source = open_local(there.context)
    s3.cuts = 1000
    with pytest.raises(OSError, match=r"bytes arrived instead of|payload|closed|Incomplete|Broken"):
        list(source.shard(0, 1, 0))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"gs:// needs a package that is not installed; install titan-data\[gs\]"):
        located("gs://bucket/file", "training.dataset_path")


def test_ranges_of_any_server(tmp_path: Path, s3: FakeS3) -> None:
    """An ``https://`` address; here of the store's own, without encryption."""
    numbers(s3, tmp_path)
    s3.client().put_bucket_acl(Bucket=BUCKET, ACL="public-read")
    s3.client().put_object_acl(Bucket=BUCKET, Key="numbers/a.bin", ACL="public-read")
    file = located(f"{s3.url}/{BUCKET}/numbers/a.bin", "training.dataset_path")
    assert kind_of(file) == "file"
    assert list(islice(RemoteArray(RemoteBytes(file, FetchedBlocks()), "<u4")[7:10], 3)) == [7, 8, 9]
