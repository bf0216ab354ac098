"""Parquet and Arrow files: rows by number from any form of them, in bounded memory."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet
import pytest

from harness.tables import COUNT, FORMS, TABLE, TEXTS, request, rows, written
from titan_core.api import CorruptRecord, ShuffledDocuments, UserError
from titan_data import parquet_files, row_groups
from titan_data.parquet_files import PARQUET
from titan_data.parquet_pages import longest_text, pages
from titan_data.record_files import check_tables, open_local
from titan_data.row_groups import _decoded
from titan_data.table_columns import Columns

pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("form", FORMS)
def test_each_row_is_read_by_its_number(form: str, tmp_path: Path, cache_folder: Path) -> None:
    files = written(tmp_path / "data", form)
    documents = rows(files, Columns("text"))
    assert len(documents) == COUNT
    order = random.Random(0).sample(range(COUNT), COUNT)
    assert [documents.text(index) for index in order] == [{"text": TEXTS[index]} for index in order]
    assert [documents.text(index)["text"] for index in range(COUNT)] == TEXTS  # type: ignore[index, call-overload]
    everything = rows(files, Columns(others=None))
    assert [everything.text(index) for index in range(COUNT)] == TABLE.to_pylist()
    chats = rows(files, Columns(others=("messages", "prompt")))
    assert chats.text(50) == {"messages": TABLE["messages"][50].as_py()}
    source = open_local(request(tmp_path / "data"))
    assert sorted(text for index in range(3) for text in source.shard(index, 3, 0)) == sorted(TEXTS)  # type: ignore[type-var]
    kept = [file for file in cache_folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in kept) < 3000, "an index, and nothing of the texts"


@pytest.mark.parametrize("form", ["one row group", "zstd, small pages", "a compressed Arrow stream"])
def test_memory_is_bounded_by_bytes(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_groups, "LIMIT", 3000)
    monkeypatch.setattr(row_groups, "PART", 300)
    documents = rows(written(tmp_path / "data", form), Columns("text"))
    for index in random.Random(0).sample(range(COUNT), COUNT):
        assert documents.text(index) == {"text": TEXTS[index]}
        assert _decoded.bytes <= 3000 or len(_decoded._kept) == 1
    assert _decoded.bytes == sum(size for _, size in _decoded._kept.values())


@pytest.mark.parametrize("form", ["snappy", "an Arrow file"])
def test_a_library_that_registers_a_type_changes_no_file(form: str, tmp_path: Path) -> None:
    """As the import of datasets does, for a dataset of the hub beside files that datasets wrote."""
    import datasets

    arrays = datasets.Features({"x": datasets.Array2D((1, 2), "int32"), "y": [datasets.Array2D((1, 2), "int32")]})
    table = datasets.Dataset.from_dict({"x": [[[1, 2]]], "y": [[[[3, 4]]]]}, arrays).data.table
    FORMS[form](table, tmp_path / "a")
    name = table.schema.field("x").type.extension_name
    pyarrow.unregister_extension_type(name)
    try:
        records = [rows(list(tmp_path.glob("a.*")), Columns(others=None)).text(0)]
    finally:
        pyarrow.register_extension_type(table.schema.field("x").type)
    records.append(rows(list(tmp_path.glob("a.*")), Columns(others=None)).text(0))
    assert records == [{"x": [[1, 2]], "y": [[[3, 4]]]}] * 2  # type: ignore[comparison-overlap]


def test_what_a_dataset_decoded_goes_with_it(tmp_path: Path) -> None:
    documents = rows(written(tmp_path / "data", "snappy"), Columns("text"))
    documents.text(0)
    number = documents._number
    assert any(key[0] == number for key in _decoded._kept)
    del documents
    assert not any(key[0] == number for key in _decoded._kept)


@pytest.mark.parametrize("shuffle", ["none", "blocks"])
def test_a_group_is_decoded_once_where_its_rows_are_read_in_order(
    shuffle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small one as a whole, a large one in parts of which few are kept."""
    texts = [f"{number} " * 100 for number in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=1000)
    monkeypatch.setattr(row_groups, "PART", 50_000)
    monkeypatch.setattr(row_groups, "LIMIT", 400_000)
    monkeypatch.setattr("titan_core.api.data.orders.UNPACKED_BLOCK", 50_000)
    begun = []
    tables = PARQUET.opened.tables  # type: ignore[attr-defined]

    def noted(self: Any, content: Any, group: int, *more: Any) -> Any:
        begun.append(group)
        return tables(self, content, group, *more)

    monkeypatch.setattr(PARQUET.opened, "tables", noted)
    source = open_local(request(tmp_path, shuffle=shuffle))
    shards = [source.shard(index, 2, 0) for index in range(2)]
    found = [text for pair in zip(*shards, strict=False) for text in pair]
    assert len(set(found)) >= 2900 - 64 * 2
    if shuffle == "none":
        assert begun == [0, 1, 2]
    else:
        assert len(begun) <= 2 * 3000 * 500 / 50_000, "at most twice for each block, not for each document"


@pytest.mark.full
def test_blocks_of_packed_files_are_of_unpacked_bytes(tmp_path: Path) -> None:
    texts = ["the same words " * 300] * 20_000  # 90 MB, which become some kB
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=500,
                                use_dictionary=False, compression="zstd")  # fmt: skip
    source = open_local(request(tmp_path, shuffle="blocks"))
    assert isinstance(source, ShuffledDocuments)
    assert source._documents.unpacked_bytes == pytest.approx(90e6, rel=0.01)  # type: ignore[attr-defined]
    assert len(list(source.shard(1, 3, 0))) == pytest.approx(20_000 / 3, abs=200)


def test_a_corpus_that_does_not_stay_decoded_is_warned_of_in_random_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path / "data", "snappy")
    check_tables(request(tmp_path / "data"))
    open_local(request(tmp_path / "data"))
    assert not caplog.records
    monkeypatch.setattr(row_groups, "LIMIT", 2000)
    open_local(request(tmp_path / "data", shuffle="blocks"))
    check_tables(request(tmp_path / "data"))
    assert not caplog.records
    open_local(request(tmp_path / "data"))
    (record,) = caplog.records
    assert "a document at random costs the decoding of its group: set data.shuffle" in record.getMessage()


def test_what_is_announced_and_counted_are_the_column_chunks_of_groups(tmp_path: Path) -> None:
    files = written(tmp_path / "data", "uncompressed, a checksum a page")
    documents = rows(files, Columns("text"))
    footer = pyarrow.parquet.read_metadata(files[0])
    path = [footer.row_group(0).column(number).path_in_schema for number in range(footer.num_columns)].index("text")
    chunks = [footer.row_group(number).column(path) for number in range(footer.num_row_groups)]
    expected = [(files[0], chunk.dictionary_page_offset, chunk.dictionary_page_offset + chunk.total_compressed_size)
                for chunk in chunks]  # fmt: skip
    assert documents.extents(0, 40) == expected
    assert documents.extents(10, 12) == expected[1:2]
    assert documents.useful_bytes(10) == chunks[1].total_compressed_size // 9
    documents.read_ahead(0, COUNT)


@pytest.mark.parametrize("make", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
@pytest.mark.parametrize("rows", [2**62, 2**50])
def test_batches_that_claim_more_rows_than_a_file_can_have(make: Any, rows: int, tmp_path: Path) -> None:
    """Of four batches of 2^62 rows, the sum does not fit into 64 bits."""
    table = pyarrow.table({"text": [f"text {number}" for number in range(12_345)]})
    file = tmp_path / "hostile.arrow"
    with pyarrow.OSFile(str(file), "wb") as sink, make(sink, table.schema) as writer:
        for _ in range(4):
            writer.write_table(table)
    file.write_bytes(file.read_bytes().replace(struct.pack("<q", 12_345), struct.pack("<q", rows)))
    with pytest.raises(
        UserError, match=r"hostile\.arrow: not Arrow, or damaged: its groups of rows claim to end at the rows"
    ):
        next(iter(open_local(request(file)).shard(0, 1, 0)))


LIMIT = 16_384
"""Bytes of a row in the tests below; 24 times as much is decoded together with others."""


def limited(table: pyarrow.Table, file: Path, limit: int = LIMIT, **options: Any) -> row_groups.RowGroups:
    pyarrow.parquet.write_table(table, file, row_group_size=len(table), **options)
    return row_groups.RowGroups([file], [file], PARQUET, Columns(others=None), lambda record, place: record, limit)


def test_few_different_texts_in_lists_are_no_bomb(tmp_path: Path) -> None:
    """The pages with the numbers of roles are much larger than a role."""
    rng = random.Random(0)
    chats = [
        [
            {"role": rng.choice(["user", "assistant"]), "content": f"message {chat} {turn}"}
            for turn in range(4 if chat else 0)
        ]
        for chat in range(3000)
    ]
    documents = limited(pyarrow.table({"messages": chats}), tmp_path / "chats.parquet")
    assert [documents.text(index)["messages"] for index in range(3000)] == chats  # type: ignore[index, call-overload]
    opened = documents._opened(0)
    assert isinstance(opened, parquet_files.ParquetFile)
    # pyarrow 21 sorts the fields of inferred structs.
    expansions = {one.path.rpartition(".")[2]: one for one in (opened._expansions[0, leaf] for leaf in range(2))}
    role, content = expansions["role"], expansions["content"]
    assert not role.as_dictionary and not content.as_dictionary, "which takes ten times as long"
    longest = max(len(turn["content"]) for chat in chats for turn in chat)
    assert content.size == (4 * 2999 + 1) * (8 + longest), "and one for the empty list"


@pytest.mark.parametrize("first", [[], ["a"] * 3000])
def test_a_long_text_in_a_dictionary_counts_as_often_as_it_may_be_used(first: list[str], tmp_path: Path) -> None:
    bomb = [*first, *["a" * 2000] * 1000]
    documents = limited(pyarrow.table({"text": [["a"], bomb]}), tmp_path / "bomb.parquet")
    assert documents.text(0) == {"text": ["a"]}
    opened = documents._opened(0)
    assert isinstance(opened, parquet_files.ParquetFile) and opened._expansions[0, 0].as_dictionary
    size = 8 + sum(8 + len(text) for text in bomb)
    with pytest.raises(CorruptRecord, match=rf"the row takes {size:,} bytes, more than data\.max_record_bytes"):
        documents.text(1)


def test_the_footer_does_not_say_how_large_pages_are(tmp_path: Path) -> None:
    """It may claim that a list of equal numbers is large in the file too."""
    file = tmp_path / "bomb.parquet"
    limited(pyarrow.table({"text": [[7] * 10_000]}), file)
    chunk = pyarrow.parquet.read_metadata(file).row_group(0).column(0)

    def sizes(uncompressed: int) -> bytes:
        """Fields 6 and 7 of a column chunk's metadata in Thrift's compact protocol: zigzag varints of two bytes."""
        numbers = (2 * uncompressed, 2 * chunk.total_compressed_size)
        return b"".join(bytes([0x16, number & 127 | 128, number >> 7]) for number in numbers)

    content = file.read_bytes()
    assert content.count(sizes(chunk.total_uncompressed_size)) == 1
    file.write_bytes(content.replace(sizes(chunk.total_uncompressed_size), sizes(8000)))
    assert pyarrow.parquet.read_metadata(file).row_group(0).column(0).total_uncompressed_size == 8000
    documents = row_groups.RowGroups([file], [file], PARQUET, Columns(others=None), lambda record, place: record, 1600)
    for _ in range(2):
        with pytest.raises(
            CorruptRecord, match=r"column text\.list\.element, whose 10,000 values are nearly all equal, takes"
        ):
            documents.text(0)


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
def test_the_longest_text_of_a_dictionary(codec: str, tmp_path: Path) -> None:
    rng = random.Random(codec)
    texts = ["ü" * rng.randrange(300) for _ in range(200)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", compression=codec)
    chunk = pyarrow.parquet.read_metadata(tmp_path / "a.parquet").row_group(0).column(0)
    content = (tmp_path / "a.parquet").read_bytes()
    page = next(pages(content, chunk.dictionary_page_offset, chunk.data_page_offset))
    longest = pyarrow.compute.max(pyarrow.compute.binary_length(pyarrow.array(texts))).as_py()
    assert longest_text(content, page, chunk.compression) == (page.unpacked if codec == "lz4" else longest)
    large = page._replace(unpacked=1 << 24)
    assert longest_text(content, large, chunk.compression) == 1 << 24


def test_headers_of_pages_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walked = []

    def noted(content: Any, begin: int, end: int) -> Any:
        walked.append(begin)
        return pages(content, begin, end)

    monkeypatch.setattr(parquet_files, "pages", noted)
    monkeypatch.setattr(row_groups, "LIMIT", 3000)
    monkeypatch.setattr(row_groups, "PART", 300)
    monkeypatch.setattr(parquet_files, "_PER_FOOTER", 0)  # so that footers stay
    documents = limited(TABLE.slice(0, 40), tmp_path / "a.parquet")
    for index in random.Random(0).sample(range(40), 40):
        documents.text(index)
    assert len(walked) == len(set(walked)) == 5
