"""Parquet and Arrow files: rows by number from any form of them, bounded memory, and one error for each kind of damage."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from titan_core.api import CorruptRecord, DatasetContext, ShuffledDocuments, UserError
from titan_data import row_groups
from titan_data.arrow_files import ARROW
from titan_data.foreign.config import InputIdsSection
from titan_data.foreign.input_ids import check_input_ids, open_input_ids
from titan_data.parquet_files import PARQUET
from titan_data.record_files import check_tables, open_local
from titan_data.row_groups import RowGroups, _decoded
from titan_data.table_columns import Columns

COUNT = 100
TEXTS = [f"document {number} ü " + "of words " * (number * 7 % 11) for number in range(COUNT)]
TABLE = pyarrow.table({
    "other": [{"text": "no"}] * COUNT,
    "text": TEXTS,
    "text.more": ["no"] * COUNT,
    "messages": [[{"role": "user", "content": text}] * (number % 3) for number, text in enumerate(TEXTS)],
})  # fmt: skip


def parquet(**options: Any) -> Callable[[pyarrow.Table, Path], None]:
    return lambda table, file: pyarrow.parquet.write_table(table, file.with_suffix(".parquet"), **options)


def arrow(new: Callable[..., Any], compression: str | None = None) -> Callable[[pyarrow.Table, Path], None]:
    def write(table: pyarrow.Table, file: Path) -> None:
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with new(str(file.with_suffix(".arrow")), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=9)

    return write


def categories(write: Callable[[pyarrow.Table, Path], None]) -> Callable[[pyarrow.Table, Path], None]:
    column = TABLE.schema.get_field_index("text")
    return lambda table, file: write(table.set_column(column, "text", table["text"].dictionary_encode()), file)


FORMS: dict[str, Callable[[pyarrow.Table, Path], None]] = {
    "one row group": parquet(),
    "snappy": parquet(row_group_size=9, compression="snappy"),
    "zstd, small pages": parquet(row_group_size=9, compression="zstd", data_page_size=64),
    "gzip, version 2 of pages": parquet(row_group_size=9, compression="gzip", data_page_version="2.0"),
    "uncompressed, a checksum a page": parquet(row_group_size=9, compression="none", write_page_checksum=True),
    "a row a group": parquet(row_group_size=1),
    "an Arrow stream": arrow(pyarrow.ipc.new_stream),
    "a compressed Arrow stream": arrow(pyarrow.ipc.new_stream, "lz4"),
    "an Arrow file": arrow(pyarrow.ipc.new_file),
    "a compressed Arrow file": arrow(pyarrow.ipc.new_file, "zstd"),
    "Parquet with categories": categories(parquet(row_group_size=9)),
    "an Arrow file with categories": categories(arrow(pyarrow.ipc.new_file)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def request(path: Path, field: str = "text", **more: Any) -> DatasetContext[None]:
    name = "arrow" if any(file.suffix == ".arrow" for file in [path, *path.glob("*")]) else "parquet"
    return DatasetContext(name, str(path), field, 0, "recipe: training.dataset_path", section=None, **more)


def written(folder: Path, form: str) -> list[Path]:
    """Write the table to three files, one of them without rows."""
    folder.mkdir()
    for number, (first, last) in enumerate([(0, 40), (40, 40), (40, COUNT)]):
        FORMS[form](TABLE.slice(first, last - first), folder / f"{number}")
    return sorted(folder.iterdir())


def rows(files: list[Path], columns: Columns) -> RowGroups:
    form = ARROW if files[0].suffix == ".arrow" else PARQUET
    return RowGroups(files, files, form, columns, lambda record, place: record)


@pytest.mark.parametrize("form", FORMS)
def test_each_row_is_read_by_its_number(form: str, tmp_path: Path, cache: Path) -> None:
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
    kept = [file for file in cache.rglob("*") if file.is_file()]
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


# Damage


def bad(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def make(file: Path) -> Path:
        file.write_bytes(change(file.read_bytes()))
        return file

    return make


BAD: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "truncated": ("snappy", bad(lambda raw: raw[:-300]), "not Parquet, or damaged: Parquet magic bytes not found in footer"),
    "a wrong footer": ("snappy", bad(lambda raw: raw[:-40] + b"\xff" * 32 + raw[-8:]), "not Parquet, or damaged: "),
    "a wrong length of the footer": (
        "snappy",
        bad(lambda raw: raw[:-8] + b"\xff\xff\xff\x7fPAR1"),
        "not Parquet, or damaged",
    ),
    "empty": ("snappy", bad(lambda raw: b""), "not Parquet, or damaged: Parquet file size is 0 bytes"),
    "another format": ("snappy", bad(lambda raw: b'{"text": "a"}\n' * 9), "not Parquet, or damaged"),
    "a truncated stream": ("an Arrow stream", bad(lambda raw: raw[:-500]), "not Arrow, or damaged: the message at byte "),
    "a truncated Arrow file": ("an Arrow file", bad(lambda raw: raw[: len(raw) // 2]), "not Arrow, or damaged: "),
    "a stream without a schema": ("an Arrow stream", bad(lambda raw: raw[500:]), "not Arrow, or damaged: "),
    "an empty Arrow file": (
        "an Arrow stream",
        bad(lambda raw: b""),
        "not Arrow, or damaged: it does not",
    ),
    "no Arrow file": ("an Arrow stream", bad(lambda raw: b'{"text": "a"}\n' * 99), "not Arrow, or damaged: "),
}


@pytest.mark.parametrize("damage", BAD)
def test_a_damaged_file_is_one_error_that_names_it(damage: str, tmp_path: Path) -> None:
    form, make, message = BAD[damage]
    file = make(written(tmp_path / "data", form)[2])
    (problem,) = check_tables(request(tmp_path / "data"))
    assert str(problem).startswith(f"{file}: {message}")
    with pytest.raises(UserError) as caught:
        open_local(request(tmp_path / "data"))
    assert caught.value.problems == (problem,)


def _outcomes(file: Path) -> list[str]:
    """Return what becomes of each row of a file, or of the file."""
    try:
        documents = rows([file], Columns(others=None))
    except UserError as error:
        return [str(error)]
    found = []
    for index in range(min(len(documents), COUNT)):
        try:
            found.append(str(documents.text(index)))
        except CorruptRecord as error:
            found.append(f"{error.place}: {error.why}")
        except UserError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("form", ["snappy", "an Arrow stream", "an Arrow file"])
def test_damage_anywhere_is_an_error_or_harmless(form: str, seed: int, tmp_path: Path) -> None:
    """The libraries end the process where a footer or an offset is wrong, unless it is checked first."""
    file = written(tmp_path / "data", form)[0]
    raw, generator = bytearray(file.read_bytes()), random.Random(f"{form} {seed}")
    at = generator.randrange(len(raw) - 8)
    raw[at : at + 8] = generator.randbytes(8)
    file.write_bytes(raw)
    assert all(one.startswith(("{", str(file))) for one in _outcomes(file)), "a record, or an error that names the file"


@pytest.mark.full
def test_a_footer_that_would_end_the_process(tmp_path: Path) -> None:
    """Statistics of the wrong length, in a footer that is otherwise intact."""
    table = pyarrow.table({"text": [f"abc {n}" for n in range(100)], "n": [1] * 100, "m": [[{"a": "x"}]] * 100})
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, file, row_group_size=30)
    raw = file.read_bytes()
    size = int.from_bytes(raw[-8:-4], "little")
    refused = 0
    for seed in range(200):
        generator, bad = random.Random(seed), bytearray(raw)
        bad[len(raw) - 8 - generator.randrange(1, size)] = generator.randrange(256)
        file.write_bytes(bad)
        refused += _outcomes(file)[0].startswith(str(file))
    assert refused > 100


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_an_encrypted_file_is_refused(plaintext_footer: bool, tmp_path: Path) -> None:
    from pyarrow.parquet import encryption

    class Keys(encryption.KmsClient):  # type: ignore[misc]
        def wrap_key(self, key: bytes, master: str) -> str:
            return key.hex()

        def unwrap_key(self, wrapped: str, master: str) -> bytes:
            return bytes.fromhex(wrapped)

    settings = encryption.EncryptionConfiguration(
        footer_key="footer", column_keys={"column": ["text"]}, plaintext_footer=plaintext_footer
    )
    connection = encryption.KmsConnectionConfig()
    properties = encryption.CryptoFactory(lambda _: Keys()).file_encryption_properties(connection, settings)
    table = pyarrow.table({"text": TEXTS})
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    (problem,) = check_tables(request(tmp_path))
    assert str(problem) == f"{tmp_path}/a.parquet: is encrypted, which titan-data does not read; decrypt it"


COLUMNS: dict[str, tuple[pyarrow.Table, str]] = {
    "missing": (pyarrow.table({"body": ["a"]}), "no field 'text' (fields: body); set data.text_field, or data.format"),
    "numbers": (pyarrow.table({"text": [1]}), "column 'text' contains int64, not text; set data.text_field"),
    "lists": (pyarrow.table({"text": [["a"]]}), "column 'text' contains list<"),
    "bytes": (pyarrow.table({"text": [b"a"]}), "column 'text' contains binary, not text"),
    "twice": (pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"]), "has two columns 'text'; rename one"),
}


@pytest.mark.parametrize("form", ["snappy", "an Arrow file"])
@pytest.mark.parametrize("mistake", COLUMNS)
def test_a_column_that_is_missing_or_of_the_wrong_type_names_the_file(mistake: str, form: str, tmp_path: Path) -> None:
    table, message = COLUMNS[mistake]
    written(tmp_path / "data", form)
    FORMS[form](table, tmp_path / "data" / "9")
    (problem,) = check_tables(request(tmp_path / "data"))
    assert str(problem).startswith(f"{tmp_path}/data/9.{'arrow' if 'Arrow' in form else 'parquet'}: {message}")


def test_columns_of_token_ids_are_integers(tmp_path: Path) -> None:
    asked = DatasetContext("input_ids", str(tmp_path), "text", 0, "here", section=InputIdsSection(), vocab_size=300)
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1, 2]], "labels": [[-100, 2]], "n": ["x"]}),
                                tmp_path / "a.parquet")  # fmt: skip
    assert check_input_ids(asked) == []
    (document,) = open_input_ids(asked).shard(0, 1, 0)
    assert document.weights.tolist() == [0, 1]  # type: ignore[union-attr]
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1.5]]}), tmp_path / "b.parquet")
    (problem,) = check_input_ids(asked)
    assert "b.parquet: column 'input_ids' contains list<" in str(problem) and "not lists of token ids" in str(problem)


@pytest.mark.parametrize("form", ["snappy", "zstd, small pages", "an Arrow stream", "an Arrow file"])
def test_a_null_is_reported_with_its_row_and_the_others_are_read(form: str, tmp_path: Path) -> None:
    FORMS[form](pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "a")
    shard, found, errors = open_local(request(tmp_path)).shard(0, 1, 0), [], []
    while len(found) + len(errors) < 3:
        try:
            found.append(next(shard))
        except CorruptRecord as error:
            errors.append(error)
    assert sorted(found) == ["a", "b"]  # type: ignore[type-var]
    (error,) = errors
    assert error.place in (f"{tmp_path}/a.parquet, row 1", f"{tmp_path}/a.arrow, row 1")
    assert error.why == "field 'text' contains null, not text"


def test_a_damaged_group_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    file = written(tmp_path / "data", "uncompressed, a checksum a page")[0]
    raw = file.read_bytes()
    file.write_bytes(raw.replace(TEXTS[12].encode(), TEXTS[12].encode().replace(b"document", b"Document")))
    documents = rows([file], Columns("text"))
    for index in range(9, 18):
        with pytest.raises(CorruptRecord) as caught:
            documents.text(index)
        assert caught.value.place == f"{file}, row {index}"
        assert caught.value.why.startswith("its group of rows (9 to 17) cannot be read: ")
    assert all(documents.text(index) == {"text": TEXTS[index]} for index in range(len(documents)) if not 9 <= index < 18)


def test_a_file_that_changes_is_reported(tmp_path: Path) -> None:
    files = written(tmp_path / "data", "snappy")
    documents = rows(files, Columns("text"))
    pyarrow.parquet.write_table(TABLE.slice(0, 3), tmp_path / "new")
    (tmp_path / "new").replace(files[2])
    with pytest.raises(
        UserError, match=r"2\.parquet: has changed since its rows were located, when the job started, or is damaged"
    ):
        [documents.text(index) for index in range(COUNT)]


def test_a_stream_with_dictionaries_is_refused(tmp_path: Path) -> None:
    categories(arrow(pyarrow.ipc.new_stream))(TABLE, tmp_path / "a")
    (problem,) = check_tables(request(tmp_path))
    assert "a stream with dictionaries cannot be read from its middle: write an Arrow file" in str(problem)


# JSON that is not one record a line

ARRAYS: dict[str, str] = {
    "an array": json.dumps([{"text": text} for text in TEXTS], ensure_ascii=False),
    "an indented array": json.dumps([{"text": text, "more": [1, {"a": "]"}]} for text in TEXTS], indent=2),
    "records of several lines": "\n".join(json.dumps({"text": text}, indent=1) for text in TEXTS),
    "blanks": " \n[ " + " ,\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n , ] \n",
}


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("form", ARRAYS)
def test_arrays_and_records_of_several_lines(
    form: str, mark: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_data.json_arrays._CHUNK", chunk)
    (tmp_path / "a.json").write_text(mark + ARRAYS[form])
    (tmp_path / "b.json").write_text('[{"text": "the last"}]')
    source = open_local(DatasetContext("json", str(tmp_path), "text", 0, "here", section=None, shuffle="none"))
    assert list(source.shard(0, 1, 0)) == [*TEXTS, "the last"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": "b"', "not JSON at byte 16: "),
        ('[{"text": "a"} {"text": "b"}]', "not JSON at byte 15: records of an array must be separated by commas"),
        ('[{"text": "ä"}, nothing]', "not JSON at byte 17: "),
        ('[{"text": "a"}]]', "not JSON at byte 15: "),
    ],
)
def test_an_array_that_is_not_json_is_one_error(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError) as caught:
        open_local(DatasetContext("json", str(tmp_path), "text", 0, "here", section=None))
    assert str(caught.value).startswith(f"{tmp_path}/a.json: {message}")


def test_a_record_of_an_array_without_a_text_is_reported_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"}, 5]')
    shard = open_local(DatasetContext("json", str(tmp_path), "text", 0, "here", section=None, shuffle="none")).shard(0, 1, 0)
    assert next(shard) == "a"
    with pytest.raises(CorruptRecord) as caught:
        next(shard)
    assert caught.value.place == f"{tmp_path}/a.json, record 2" and "not a number" in caught.value.why
