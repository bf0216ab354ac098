"""Reads datasets through Hugging Face ``datasets``: from the hub, streamed, and from local files, memory-mapped."""

from __future__ import annotations

import glob
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from titan_core.api import (
    CorruptRecord,
    DatasetContext,
    Document,
    DocumentShard,
    DocumentSource,
    ShuffledDocuments,
    UserError,
)
from titan_core.toolkit.reading import State, is_transient
from titan_core.toolkit.text import shorten
from titan_data.compressed import decompressed
from titan_data.json_lines import JsonRecords
from titan_data.local_files import EMPTY, EMPTY_FIX, ENDINGS, find_files, require_hub_name
from titan_data.records import FIELD_FIX, Reader, missing_field, reads_text
from titan_data.storage import is_remote, not_remote

PRESETS = {
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
}
"""Hub datasets with their own component name: (hub name, configuration, split)."""


def open_local(context: DatasetContext[None]) -> DocumentSource:
    """Open local JSON, Parquet or Arrow files.

    Raises:
        UserError: the files cannot be read, contain no documents, or lack the text field.
    """
    if context.format is not None:
        return open_files(context, context.name, reads_text(context))
    return open_files(context, context.name, reads_text(context), context.text_field)


def open_files(context: DatasetContext[Any], form: str, read: Reader, field: str | None = None) -> DocumentSource:
    """Open local files of ``form``, a key of :data:`~titan_data.local_files.ENDINGS`.

    Args:
        field: the only field that ``read`` needs, if it needs only one.

    Raises:
        UserError: the files cannot be read, contain no documents, or lack the field.
    """
    files = find_files(context, ENDINGS[form])
    plain = decompressed(files)
    if form == "json" and (lines := JsonRecords(plain, files, read)).are_lines:
        if len(lines) == 0:
            raise UserError.one(context.where, EMPTY, EMPTY_FIX)
        return ShuffledDocuments(lines, context.seed, plain, context.shuffle)
    if is_remote(context.path or ""):
        raise UserError(not_remote(context, "a JSON array" if form == "json" else form))
    datasets.disable_progress_bars()
    try:
        # Files may differ in columns that are not read.
        columns = {"columns": [field]} if form == "parquet" and field is not None else {}
        names = [glob.escape(str(file)) for file in plain]
        table = datasets.load_dataset(form, data_files=names, split="train", **columns)
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        if columns:
            _require_column(files, field or "")
        cause = error.__cause__ or error
        raise UserError.one(context.where, f"cannot be read as {form}: {cause}", "fix the file") from error
    if len(table) == 0:
        raise UserError.one(context.where, EMPTY, EMPTY_FIX)
    if field is not None and field not in table.column_names:
        raise UserError.one(context.where, missing_field(field, table.column_names), FIELD_FIX)
    rows = _Rows(table if field is None else table.select_columns([field]), context.path, read)
    return ShuffledDocuments(rows, context.seed, plain, context.shuffle)


def _require_column(files: Iterable[Path], field: str) -> None:
    """
    Raises:
        UserError: a Parquet file has no column ``field``.
    """
    for file in files:
        try:
            names = pyarrow.parquet.read_schema(file).names
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError.one(str(file), f"not a Parquet file: {error}", "check the path") from None
        if field not in names:
            raise UserError.one(str(file), missing_field(field, names), FIELD_FIX)


class _Rows:
    def __init__(self, table: datasets.Dataset, path: str | None, read: Reader) -> None:
        self._table, self._path, self._read = table, path, read

    def __len__(self) -> int:
        return len(self._table)

    def text(self, index: int) -> Document:
        """Return the document in row ``index``.

        Raises:
            CorruptRecord: the row is not UTF-8, or has no document.
        """
        place = f"{self._path}, row {index}"
        try:
            record = self._table[index]
        except UnicodeDecodeError as error:
            why = f"not UTF-8 text: {error.reason} at byte {error.start}"
            raise CorruptRecord(place, why, "convert it to UTF-8") from None
        return self._read(record, place)


def open_hub(context: DatasetContext[None]) -> DocumentSource:
    """Stream a dataset from the Hugging Face hub: ``training.dataset_path = "name"`` or ``"name:configuration"``, or one of
    :data:`PRESETS`.

    Raises:
        UserError: the dataset does not exist, or the hub cannot be reached.
    """
    return stream_hub(context, reads_text(context))


def stream_hub(context: DatasetContext[Any], read: Reader) -> DocumentSource:
    """Stream the dataset of :func:`open_hub`, whose records ``read`` converts.

    Raises:
        UserError: the dataset does not exist, or the hub cannot be reached.
    """
    if context.name in PRESETS:
        path, configuration, split = PRESETS[context.name]
        path = context.path or path
    else:
        path, _, configuration = (context.path or "").partition(":")
        split = context.default_split
    split = context.split or split
    require_hub_name(path, context)
    try:
        with _without_retry_warnings():
            builder = datasets.load_dataset_builder(path, configuration or None)
            _require_own_files(path, builder.config.data_files or {})
            stream = builder.as_streaming_dataset(split=split)
    except Exception as error:
        # The exception classes of the hub's HTTP client differ between its versions.
        if not (is_transient(error) or _of_hub(error) or isinstance(error, OSError | ValueError | RuntimeError)):
            raise
        raise UserError.one(
            f"dataset {path!r}, split {split!r}",
            f"cannot be opened on the hub: {type(error).__name__}: {error}",
            f"check the name, {context.split_key} and the network, or train on local files (training.dataset = 'json')",
            missing=is_transient(error),
        ) from error
    return StreamedDocuments(stream, context, read)


def _require_own_files(path: str, data_files: Mapping[Any, Iterable[Any]]) -> None:
    """
    Raises:
        UserError: the dataset's card names files outside of the dataset. ``datasets`` would read this machine's.
    """
    own = f"hf://datasets/{path}@".lower()  # the hub ignores the case of a name
    for file in (str(file) for files in data_files.values() for file in files):
        if not file.lower().startswith(own) or ".." in file.split("/"):
            why = f"its card names the file {shorten(file)}, which is not part of the dataset"
            raise UserError.one(f"dataset {path!r}", why, "use another dataset, or download the files that you trust")


@contextmanager
def _without_retry_warnings() -> Iterator[None]:
    """Silence the two lines that the hub's client logs for each retry. The error after the last one says as much."""
    logger = logging.getLogger("huggingface_hub.utils._http")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _of_hub(error: Exception) -> bool:
    return any(cls.__module__.partition(".")[0] == "huggingface_hub" for cls in type(error).__mro__)


def _connected(records: Iterable[Any]) -> Iterator[Any]:
    """Yield from ``records``. Errors of the hub's client become an ``OSError``, which the reader retries."""
    try:
        yield from records
    except Exception as error:
        if _of_hub(error) and not isinstance(error, OSError):
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        raise


class StreamedDocuments:
    """An ``IterableDataset`` divided into logical shards: by files as far as their number allows, then by taking every n-th
    document."""

    num_documents = None

    def __init__(self, stream: Any, context: DatasetContext[Any], read: Reader) -> None:
        self._stream, self._read = stream, read
        self._name = context.path or context.name

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """Return logical shard ``index`` of ``count``. Its order is the same in each epoch."""
        by_file = math.gcd(count, self._stream.num_shards)
        part = self._stream.shard(num_shards=by_file, index=index % by_file)  # a copy with its own position
        return _StreamShard(part, self._name, self._read, index // by_file, count // by_file)


class _StreamShard:
    """Every ``step``-th document of a stream, starting at document ``first``."""

    def __init__(self, stream: Any, name: str, read: Reader, first: int, step: int) -> None:
        self._stream = stream
        self._name, self._read = name, read
        self._first = first
        self._step = step
        self._iterator: Any = None
        self._loaded: State | None = None  # the stream's state_dict() ignores a loaded state until iteration starts
        self._seen = 0
        self._unproven = 0  # records after which the stream's position must have moved
        self._before: State | None = None

    def __iter__(self) -> _StreamShard:
        return self

    def __next__(self) -> Document:
        if self._iterator is None:
            self._iterator = _connected(self._stream)
        for record in self._iterator:
            mine = self._seen % self._step == self._first
            self._seen += 1
            if self._unproven:
                self._require_progress()
            if mine:
                return self._read(record, f"dataset {self._name!r}, record {self._seen} of its shard")
        raise StopIteration

    def state_dict(self) -> State:
        return {"seen": self._seen, "stream": self._loaded if self._iterator is None else self._stream.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._seen = int(state["seen"])
        self._iterator = None
        self._loaded = state["stream"]
        if self._loaded is not None:
            self._stream.load_state_dict(self._loaded)
            self._unproven, self._before = 2, None

    def _require_progress(self) -> None:
        """Compare the stream's positions after the first two records since one was loaded. That of datasets 5.0.0 stays at
        zero, which the next resume would refuse, but by then no checkpoint of this run could be resumed.

        Raises:
            UserError: they are equal.
        """
        now = self._stream.state_dict()
        if now == self._before:
            raise UserError.one(
                f"dataset {self._name!r}",
                f"after a resume, the position that datasets {datasets.__version__} reports does not move, so checkpoints "
                "could not be resumed again",
                "install another version of datasets, and resume from this checkpoint",
            )
        self._unproven, self._before = self._unproven - 1, now
