"""Opens files of records, here or in an object store: JSON, Parquet and Arrow."""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any, Final

from titan_core.api import CorruptRecord, DatasetContext, DocumentSource, Problem, ShuffledDocuments, UserError
from titan_data.arrow_files import ARROW
from titan_data.compressed import decompressed
from titan_data.json_arrays import JsonArrays
from titan_data.json_lines import JsonRecords
from titan_data.local_files import EMPTY, EMPTY_FIX, ENDINGS, find_files, first_record
from titan_data.parquet_files import PARQUET
from titan_data.records import Reader, check_format, format_fields, reads_text
from titan_data.row_groups import RowGroups
from titan_data.storage import problems
from titan_data.table_columns import Columns

log = logging.getLogger(__name__)

_FORMS: Final = {"parquet": PARQUET, "arrow": ARROW}


def open_local(context: DatasetContext[None]) -> DocumentSource:
    """Open JSON, Parquet or Arrow files.

    Raises:
        UserError: the files cannot be read, contain no documents, or lack the text field.
    """
    return open_files(context, context.name, reads_text(context), text_columns(context))


def check_tables(context: DatasetContext[None]) -> list[Problem]:
    """Check that Parquet or Arrow files exist, are whole, and have the text field."""

    def check() -> list[Problem]:
        found = check_format(context)
        if not found and not len(_tables(context)):
            raise UserError.one(context.where, EMPTY, EMPTY_FIX)
        return found

    return problems(context, check)


def describe_tables(context: DatasetContext[None]) -> list[str]:
    """Return what is in Parquet or Arrow files.

    Raises:
        UserError: they cannot be read.
    """
    return _tables(context).describe()


def _tables(context: DatasetContext[None]) -> RowGroups:
    files = find_files(context, ENDINGS[context.name])
    return RowGroups(
        decompressed(files, context.max_record_bytes),
        files,
        _FORMS[context.name],
        text_columns(context),
        reads_text(context),
        context.max_record_bytes,
    )


def text_columns(context: DatasetContext[None]) -> Columns:
    """Return the columns that a dataset of texts reads."""
    if context.format is None:
        return Columns(needed=context.text_field, may_be_null=context.skip_corrupt)
    return Columns(others=None, named=format_fields(context.format))


def open_files(context: DatasetContext[Any], form: str, read: Reader, columns: Columns) -> DocumentSource:
    """Open files of ``form``, a key of :data:`~titan_data.local_files.ENDINGS`.

    Args:
        columns: those that ``read`` needs; of JSON, whose records may have other fields each, it gets all.

    Raises:
        UserError: the files cannot be read, contain no documents, or lack the columns.
    """
    files = find_files(context, ENDINGS[form])
    limit = context.max_record_bytes
    plain = decompressed(files, limit)
    records: JsonRecords | JsonArrays | RowGroups
    if form in _FORMS:
        records = RowGroups(plain, files, _FORMS[form], columns, read, limit)
        if context.shuffle == "documents" and multiprocessing.parent_process() is None and (advice := records.advice):
            log.warning("dataset %s: %s", context.path, advice)
    elif not (records := JsonRecords(plain, files, read, limit)).are_lines:
        records = JsonArrays(plain, files, read, limit)
    if len(records) == 0:
        raise UserError.one(context.where, EMPTY, EMPTY_FIX)
    return ShuffledDocuments(records, context.seed, plain, context.shuffle)


def first_row(context: DatasetContext[Any], form: str) -> tuple[Any, str] | None:
    """Return the first record of files of ``form``, a key of :data:`~titan_data.local_files.ENDINGS`, and its place;
    ``None`` if it takes more than a few bytes to find it.

    Raises:
        UserError: it cannot be read.
    """
    try:
        if form == "json":
            return first_record(context)
        if form not in _FORMS:
            return None
        files = find_files(context, ENDINGS[form])
        places: list[str] = []

        def read(record: Any, place: str) -> Any:
            places.append(place)
            return record

        limit = context.max_record_bytes
        columns = Columns(others=None, named=())
        rows = RowGroups(decompressed(files, limit), files, _FORMS[form], columns, read, limit)
        return (rows.text(0), places[0]) if len(rows) else None
    except CorruptRecord as error:
        raise UserError.one(error.place, error.why, error.fix) from None
