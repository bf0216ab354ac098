"""Damage of a Parquet or Arrow file is one error that names the file, and never ends the process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from harness.tables import COUNT, TABLE, TEXTS, request, rows, written
from titan_core.api import CorruptRecord, UserError
from titan_data.record_files import check_tables, open_local
from titan_data.table_columns import Columns

pytestmark = pytest.mark.usefixtures("cache_folder")


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
    "an empty Arrow file": ("an Arrow stream", bad(lambda raw: b""), "not Arrow, or damaged: it does not"),
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


@pytest.mark.quick_rows(5)
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
