"""A dataset whose documents can be fetched by index, shuffled anew for each epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy
from numpy import int64
from numpy.typing import NDArray

from titan_core.api.data.dataset import Document, DocumentShard, State

_WHOLE = 4 << 20
"""Maximum total bytes of files to be hashed completely."""
_SAMPLES, _SAMPLE = 64, 16 << 10
"""For larger files: the number of samples, evenly spaced from the first byte to the last, and the bytes in each."""


class RandomAccess(Protocol):
    """Documents that can be fetched by index, for :class:`ShuffledDocuments`."""

    def __len__(self) -> int: ...

    def text(self, index: int) -> Document:
        """Return document number ``index``."""


class ShuffledDocuments:
    """A source over documents that can be fetched by index. Each epoch has its own order, derived from the seed."""

    def __init__(self, documents: RandomAccess, seed: int, files: Sequence[Path] = ()) -> None:
        """``files``: the files that contain the documents, if any."""
        self._documents = documents
        self._seed = seed
        self._files = files
        self._order: tuple[int, NDArray[int64]] | None = None

    @property
    def num_documents(self) -> int:
        """Number of documents per epoch."""
        return len(self._documents)

    @cached_property
    def fingerprint(self) -> dict[str, Any] | None:
        """See :class:`~titan_core.api.DocumentSource`."""
        return fingerprint_files(self._files) if self._files else None

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """Return every ``count``-th document of the epoch's order, starting at ``index``."""
        return _IndexedShard(self._documents, self._epoch_order(epoch)[index::count])

    def _epoch_order(self, epoch: int) -> NDArray[int64]:
        """Return the order of an epoch. It is cached, because all logical shards of a rank use the same order."""
        if self._order is None or self._order[0] != epoch:
            generator = numpy.random.Generator(numpy.random.Philox(key=[self._seed, epoch]))
            self._order = (epoch, generator.permutation(len(self._documents)))
        return self._order[1]


def fingerprint_files(files: Sequence[Path]) -> dict[str, Any]:
    """Return the number of ``files``, their total bytes, and the SHA-256 of their sizes and of a sample of their contents,
    in order. Names and times are excluded, so a copy has the same fingerprint. A local change in large files that preserves
    every size may go unnoticed."""
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    digest = hashlib.sha256(repr(sizes).encode())
    if total <= _WHOLE:
        for file in files:
            digest.update(file.read_bytes())
    else:
        for number in range(_SAMPLES):
            digest.update(_read(files, sizes, number * (total - _SAMPLE) // (_SAMPLES - 1), _SAMPLE))
    return {"files": len(files), "bytes": total, "sample": digest.hexdigest()[:32]}


def _read(files: Sequence[Path], sizes: Sequence[int], start: int, length: int) -> bytes:
    """Read from the concatenation of the files."""
    parts = []
    for file, size in zip(files, sizes, strict=True):
        if start < size and length > 0:
            with file.open("rb") as stream:
                stream.seek(start)
                parts.append(stream.read(length))
            length -= len(parts[-1])
            start = size
        start -= size
    return b"".join(parts)


class _IndexedShard:
    def __init__(self, documents: RandomAccess, indices: NDArray[int64]) -> None:
        self._documents = documents
        self._indices = indices
        self._next = 0

    def __iter__(self) -> _IndexedShard:
        return self

    def __next__(self) -> Document:
        if self._next >= len(self._indices):
            raise StopIteration
        self._next += 1  # also after a corrupt record
        return self._documents.text(int(self._indices[self._next - 1]))

    def state_dict(self) -> State:
        return {"next": self._next}

    def load_state_dict(self, state: State) -> None:
        self._next = int(state["next"])
