"""Streams datasets from the Hugging Face hub, through ``datasets``."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import datasets
import pyarrow

from titan_core.api import (
    DatasetContext,
    Document,
    DocumentPlace,
    DocumentShard,
    DocumentSource,
    UserError,
)
from titan_core.toolkit.reading import State, is_transient
from titan_core.toolkit.text import shorten
from titan_data.local_files import require_hub_name
from titan_data.records import Reader, reads_text

_UNREADABLE = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, pyarrow.ArrowException)
"""What conversions of values raise: no such type or time zone, a date after the year 9999, a text that is not JSON."""
PRESETS = {
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
}
"""Hub datasets with their own component name: (hub name, configuration, split)."""


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


def _connected(records: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield from ``records``. Errors of the hub's client become an ``OSError``, which the reader retries.

    Raises:
        UserError: ``datasets`` does not understand a file, or cannot represent a value in it.
    """
    try:
        yield from records
    except Exception as error:
        if isinstance(error, OSError):
            raise
        if _of_hub(error):
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        if not isinstance(error, _UNREADABLE):
            raise
        why = f"datasets cannot read its next records: {type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError.one(
            f"dataset {name!r}", why, "fix its files, or train on a copy of those that can be read"
        ) from error


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
            self._iterator = _connected(self._stream, self._name)
        for record in self._iterator:
            mine = self._seen % self._step == self._first
            self._seen += 1
            if self._unproven:
                self._require_progress()
            if mine:
                return self._read(record, self._place)
        raise StopIteration

    @property
    def _place(self) -> str:
        return f"dataset {self._name!r}, record {self._seen} of its shard"

    def place(self) -> DocumentPlace | None:
        """See :class:`~titan_core.api.DocumentShard`."""
        return DocumentPlace(self._place) if self._seen else None

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
