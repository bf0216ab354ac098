"""A file that is truncated while it is read: an error names it. Reading a memory map beyond the end of its file would end
the process by SIGBUS, without a word."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from titan_core.api import DatasetContext, DocumentSource, UserError
from titan_data.csv_files import open_csv
from titan_data.foreign.formats import open_tokens
from titan_data.record_files import open_local
from titan_data.text_files import open_text

TEXTS = [f"{number} " * 4000 for number in range(40)]
TABLE = pyarrow.table({"text": TEXTS})


def arrow(file: Path) -> None:
    with pyarrow.ipc.new_file(file, TABLE.schema) as out:
        out.write_table(TABLE, 4)


def datatrove(file: Path) -> None:
    numpy.arange(400_000, dtype="<u2").tofile(file)
    (10_000 * numpy.arange(1, 41, dtype="<u8")).tofile(f"{file}.index")


FORMS: dict[str, tuple[str, Callable[[Path], object], Callable[[DatasetContext[Any]], DocumentSource]]] = {
    "json": ("a.jsonl", lambda file: file.write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS)), open_local),
    "csv": ("a.csv", lambda file: file.write_text("text\n" + "\n".join(TEXTS)), open_csv),
    "text": ("a.txt", lambda file: file.write_text("\n".join(TEXTS)), open_text),
    "parquet": ("a.parquet", lambda file: pyarrow.parquet.write_table(TABLE, file, row_group_size=4), open_local),
    "arrow": ("a.arrow", arrow, open_local),
    "datatrove": ("a.ds", datatrove, open_tokens),
}


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("name", FORMS)
def test_a_truncated_file_is_named(name: str, tmp_path: Path) -> None:
    ending, write, opened = FORMS[name]
    file = tmp_path / ending
    write(file)
    context: Any = DatasetContext(name, str(file), "text", 0, "recipe", section=None, vocab_size=2**16, shuffle="none")
    child = os.fork()  # which a signal may end
    if child == 0:
        status = 1
        try:
            shard = opened(context).shard(0, 1, 0)
            next(shard)
            os.truncate(file, 100)
            with pytest.raises(UserError, match=rf"{ending}: was truncated while it was read: it had .* 100;"):
                list(shard)
            status = 0
        except BaseException:  # noqa: BLE001 - the test process itself must not continue here
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
