"""A table in all forms of Parquet and Arrow files (:mod:`titan_data.row_groups`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from titan_core.api import DatasetContext
from titan_data.arrow_files import ARROW
from titan_data.parquet_files import PARQUET
from titan_data.row_groups import RowGroups
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
    """Return a function that writes a table as Parquet, with ``options`` of ``write_table``."""
    return lambda table, file: pyarrow.parquet.write_table(table, file.with_suffix(".parquet"), **options)


def arrow(new: Callable[..., Any], compression: str | None = None) -> Callable[[pyarrow.Table, Path], None]:
    """Return a function that writes a table with ``new``, a function of ``pyarrow.ipc``, in batches of 9 rows."""

    def write(table: pyarrow.Table, file: Path) -> None:
        options = pyarrow.ipc.IpcWriteOptions(compression=compression)
        with new(str(file.with_suffix(".arrow")), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=9)

    return write


def categories(write: Callable[[pyarrow.Table, Path], None]) -> Callable[[pyarrow.Table, Path], None]:
    """Return a function that writes the column of texts as numbers into a dictionary."""
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
    "an Arrow stream with categories": categories(arrow(pyarrow.ipc.new_stream)),
    "a compressed Arrow stream with categories": categories(arrow(pyarrow.ipc.new_stream, "zstd")),
}


def request(path: Path, field: str = "text", **more: Any) -> DatasetContext[None]:
    """Return the context of the dataset at ``path``."""
    name = "arrow" if any(file.suffix == ".arrow" for file in [path, *path.glob("*")]) else "parquet"
    return DatasetContext(name, str(path), field, 0, "recipe: training.dataset_path", section=None, **more)


def written(folder: Path, form: str) -> list[Path]:
    """Write the table to three files, one of them without rows."""
    folder.mkdir()
    for number, (first, last) in enumerate([(0, 40), (40, 40), (40, COUNT)]):
        FORMS[form](TABLE.slice(first, last - first), folder / f"{number}")
    return sorted(folder.iterdir())


def rows(files: list[Path], columns: Columns) -> RowGroups:
    """Open files of one format; their documents are records."""
    form = ARROW if files[0].suffix == ".arrow" else PARQUET
    return RowGroups(files, files, form, columns, lambda record, place: record)
