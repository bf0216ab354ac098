"""A dataset whose documents can be fetched by index, shuffled anew for each epoch.

The order is computed (:mod:`titan_core.api.data.orders`), so that opening a dataset, and resuming in it, cost the same for
any number of documents.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Protocol

from titan_core.api._files import open_file, read_bytes
from titan_core.api.data.dataset import Document, DocumentPlace, DocumentShard, Shuffle, State
from titan_core.api.data.orders import NO_DOCUMENT, VERSIONS, Blocks, Every, order_of

_WHOLE = 4 << 20
"""Maximum total bytes of files to be hashed completely."""
_SAMPLES, _SAMPLE = 64, 16 << 10
"""For larger files: the number of samples, evenly spaced from the first byte to the last, and the bytes in each."""
_AT_ONCE: Final = 4096
"""Number of a shard's next positions whose documents are computed together: one by one takes a hundred times as long."""


class RandomAccess(Protocol):
    """Documents that can be fetched by index, for :class:`ShuffledDocuments`.

    They may also have a method ``read_ahead(first, last)``: documents ``first`` to ``last`` (exclusive) are read soon, in
    random order. It starts reading them in one go, and does not wait. And a method ``extents(first, last)``, which returns
    where they are, as files, first and end bytes: :meth:`ShuffledDocuments.requests` computes from it what an order costs.
    Documents that are unpacked in groups, which take memory, may have an attribute ``unpacked_bytes``, the size of all of
    them (``None``: not known): under ``data.shuffle = "blocks"``, a shard then reads a few MiB of neighbours at a time. And
    a method ``useful_bytes(index)``, the part of its group's extents that is of document ``index``.

    So that `titan data step` can name them, they may have a method ``place(index)``, which returns where a document is (the
    file, and the line or row), as errors name it; and for `titan data where` a method ``find(place)``, which returns the
    number of the document there, or ``None``.
    """

    def __len__(self) -> int: ...

    def text(self, index: int) -> Document:
        """Return document number ``index``."""


class ShuffledDocuments:
    """A source over documents that can be fetched by index. Each epoch has its own order, derived from the seed."""

    def __init__(
        self, documents: RandomAccess, seed: int, files: Sequence[Path] = (), shuffle: Shuffle = "documents"
    ) -> None:
        """
        Args:
            files: the files that contain the documents, if any.
            shuffle: :attr:`~titan_core.api.DatasetContext.shuffle`; a source that ignores it is refused where it is not
                ``documents``.
        """
        self._documents = documents
        self._seed = seed
        self._files = files
        self._shuffle: Shuffle = shuffle

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
        return f"{self._shuffle}, version {VERSIONS[self._shuffle]}"

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """Return logical shard ``index`` of ``count`` of the epoch's order: every ``count``-th document, or block."""
        return _IndexedShard(self._documents, self._order(index, count, epoch))

    def requests(self, index: int, count: int, epoch: int) -> Iterator[tuple[int, list[tuple[Path, int, int]]]]:
        """Yield, for each document of a shard in order, its bytes, and the ranges of bytes (file, first, end) that are
        requested for it: its own, or, for the first of a window of blocks, those of all of its blocks. Nothing, unless the
        documents have a method ``extents(first, last)``, which returns the ranges of documents ``first`` to ``last``
        (exclusive)."""
        extents: Any = getattr(self._documents, "extents", None)
        useful_bytes: Any = getattr(self._documents, "useful_bytes", None)
        order = self._order(index, count, epoch)
        window, ranges = -1, []
        for first in range(0, len(order) if extents is not None else 0, _AT_ONCE):
            documents = order.documents_at(first, min(first + _AT_ONCE, len(order))).tolist()
            for place, document in enumerate(documents, first):
                if isinstance(order, Blocks) and order.window_of(place) != window:
                    window = order.window_of(place)
                    ranges += [one for block in order.ranges_of(window) for one in extents(*block)]
                if document != NO_DOCUMENT:
                    own = extents(document, document + 1)
                    size = sum(end - begin for _, begin, end in own) if useful_bytes is None else useful_bytes(document)
                    yield size, ranges if isinstance(order, Blocks) else own
                    ranges = []

    def find(self, place: str, count: int) -> DocumentPlace | None:
        """Return the document at ``place``, written as in :attr:`~titan_core.api.data.dataset.DocumentPlace.text`; ``None``
        if there is none.

        Args:
            count: number of logical shards, on which the size of documents may depend.
        """
        find: Any = getattr(self._documents, "find", None)
        index = find(place) if find is not None else None
        return None if index is None else place_in(self._documents, index)

    def position(self, index: int, count: int, epoch: int) -> tuple[int, int]:
        """Return the logical shard of ``count`` that reads document ``index`` in ``epoch``, and how many positions of the
        shard come before it."""
        shard = self._order(0, count, epoch).shard_of(index)
        return shard, self._order(shard, count, epoch).position_of(index)

    def _order(self, index: int, count: int, epoch: int) -> Every | Blocks:
        size, unpacked = self._bytes
        key = (self._seed, epoch)
        return order_of(self._shuffle, len(self._documents), size, index, count, key, unpacked=unpacked)

    @cached_property
    def _bytes(self) -> tuple[int | None, bool]:
        """The size of all documents, if it is known and needed, and whether they are unpacked."""
        if self._shuffle != "blocks":
            return None, False
        unpacked: int | None = getattr(self._documents, "unpacked_bytes", None)
        if unpacked is not None:
            return unpacked, True
        return (sum(file.stat().st_size for file in self._files) if self._files else None), False


def place_in(documents: RandomAccess, index: int) -> DocumentPlace:
    """Return where document ``index`` is: what the documents say, or its number."""
    place: Any = getattr(documents, "place", None)
    return DocumentPlace(f"document {index}" if place is None else place(index), index)


def fingerprint_files(files: Sequence[Path]) -> dict[str, Any]:
    """Return the number of ``files``, their total bytes, and the SHA-256 of their sizes and of a sample of their contents,
    in order. Names and times are excluded, so a copy has the same fingerprint. A local change in large files that preserves
    every size may go unnoticed."""
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    digest = hashlib.sha256(repr(sizes).encode())
    if total <= _WHOLE:
        for file in files:
            digest.update(read_bytes(file, longest=_WHOLE))
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
        with open_file(files[number]) as stream:
            stream.seek(start - (upto[number - 1] if number else 0))
            parts.append(stream.read(min(length, upto[number] - start)))
        length -= len(parts[-1])
        start, number = upto[number], number + 1
    return b"".join(parts)


class _IndexedShard:
    def __init__(self, documents: RandomAccess, order: Every | Blocks) -> None:
        self._documents, self._order = documents, order
        self._next = 0
        self._block: tuple[int, list[int]] | None = None  # its number, and the documents at its positions
        self._window = -1

    def __iter__(self) -> _IndexedShard:
        return self

    def __next__(self) -> Document:
        while self._next < len(self._order):
            index = self._document_at(self._next)
            self._next += 1  # also after a corrupt record
            if index != NO_DOCUMENT:
                return self._documents.text(index)
        raise StopIteration

    def _document_at(self, place: int) -> int:
        number, within = divmod(place, _AT_ONCE)
        if isinstance(self._order, Blocks) and (window := self._order.window_of(place)) != self._window:
            self._read_ahead(self._order, window)
        if self._block is None or self._block[0] != number:
            last = min((number + 1) * _AT_ONCE, len(self._order))
            self._block = number, self._order.documents_at(number * _AT_ONCE, last).tolist()
        return self._block[1][within]

    def _read_ahead(self, order: Blocks, window: int) -> None:
        """Announce the next window, and this one unless it was announced."""
        read_ahead = getattr(self._documents, "read_ahead", None)
        windows = [window + 1] if window == self._window + 1 and window else [window, window + 1]
        self._window = window
        if read_ahead is not None:
            for first, last in (one for number in windows for one in order.ranges_of(number)):
                read_ahead(first, last)

    def place(self) -> DocumentPlace | None:
        """See :class:`~titan_core.api.DocumentShard`."""
        if not self._next:
            return None
        index = self._document_at(self._next - 1)
        return None if index == NO_DOCUMENT else place_in(self._documents, index)

    def state_dict(self) -> State:
        return {"next": self._next}

    def load_state_dict(self, state: State) -> None:
        self._next = int(state["next"])
