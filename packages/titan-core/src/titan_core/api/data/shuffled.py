"""A dataset whose documents can be fetched by index, shuffled anew for each epoch.

The order is computed (:class:`~titan_core.api.data.permutation.Permutation`), so that opening a dataset, and resuming in it,
cost the same for any number of documents.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Protocol

import numpy

from titan_core.api.data.dataset import Document, DocumentShard, State
from titan_core.api.data.permutation import Permutation

_WHOLE = 4 << 20
"""Maximum total bytes of files to be hashed completely."""
_SAMPLES, _SAMPLE = 64, 16 << 10
"""For larger files: the number of samples, evenly spaced from the first byte to the last, and the bytes in each."""
ORDER: Final = "documents, version 2"
"""The order of :class:`ShuffledDocuments`. Version 1, which had no name, stored a permutation that numpy drew."""
_BLOCK: Final = 4096
"""Number of a shard's next positions whose documents are computed together: one by one takes a hundred times as long."""


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

    @property
    def num_documents(self) -> int:
        """Number of documents per epoch."""
        return len(self._documents)

    @cached_property
    def fingerprint(self) -> dict[str, Any] | None:
        """See :class:`~titan_core.api.DocumentSource`."""
        return fingerprint_files(self._files) if self._files else None

    @property
    def order(self) -> str:
        """See :class:`~titan_core.api.DocumentSource`."""
        return ORDER

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """Return every ``count``-th document of the epoch's order, starting at ``index``."""
        size = len(self._documents)
        order = Permutation(size, (self._seed, epoch)) if size else None
        return _IndexedShard(self._documents, order, range(index, size, count))


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
        upto = list(accumulate(sizes))
        for number in range(_SAMPLES):
            digest.update(_read(files, upto, number * (total - _SAMPLE) // (_SAMPLES - 1), _SAMPLE))
    return {"files": len(files), "bytes": total, "sample": digest.hexdigest()[:32]}


def _read(files: Sequence[Path], upto: Sequence[int], start: int, length: int) -> bytes:
    """Read from the concatenation of the files, which end at ``upto``."""
    parts = []
    number = bisect_right(upto, start)
    while length > 0 and number < len(files):
        with files[number].open("rb") as stream:
            stream.seek(start - (upto[number - 1] if number else 0))
            parts.append(stream.read(min(length, upto[number] - start)))
        length -= len(parts[-1])
        start, number = upto[number], number + 1
    return b"".join(parts)


class _IndexedShard:
    def __init__(self, documents: RandomAccess, order: Permutation | None, positions: range) -> None:
        """
        Args:
            order: of all documents; ``None`` if there are none.
            positions: the shard's positions in it.
        """
        self._documents, self._order, self._positions = documents, order, positions
        self._next = 0
        self._block: tuple[int, list[int]] | None = None  # its number, and the documents at its positions

    def __iter__(self) -> _IndexedShard:
        return self

    def __next__(self) -> Document:
        if self._next >= len(self._positions):
            raise StopIteration
        index = self._document_at(self._next)
        self._next += 1  # also after a corrupt record
        return self._documents.text(index)

    def _document_at(self, place: int) -> int:
        number, within = divmod(place, _BLOCK)
        if self._block is None or self._block[0] != number:
            assert self._order is not None
            block = self._positions[number * _BLOCK : (number + 1) * _BLOCK]
            self._block = number, self._order(numpy.arange(block.start, block.stop, block.step)).tolist()
        return self._block[1][within]

    def state_dict(self) -> State:
        return {"next": self._next}

    def load_state_dict(self, state: State) -> None:
        self._next = int(state["next"])
