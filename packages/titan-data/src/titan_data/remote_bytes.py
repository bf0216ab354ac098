"""Contents of files in an object store, fetched by range, with a bounded number of blocks in memory."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy

from titan_data.storage import reading

BLOCK: Final = 1 << 20
"""Bytes that are fetched together where readings are close to each other."""
_FIRST: Final = 4096
"""Bytes in which the end of a line is looked for first."""
_KEPT: Final = 64
"""FetchedBlocks that a process keeps of each dataset."""
_AHEAD: Final = 4
"""FetchedBlocks that are fetched ahead where readings follow each other."""


class RemoteBytes:
    """The contents of a file of an object store, as far as readers of memory maps use these: what is read is fetched."""

    def __init__(self, file: Path, blocks: FetchedBlocks) -> None:
        """
        Raises:
            OSError: the file cannot be found.
        """
        self._file, self._blocks = file, blocks
        with reading(file):
            self._size = file.stat().st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        """Return a byte, or consecutive ones.

        Raises:
            OSError: they cannot be fetched.
        """
        if not isinstance(index, slice):
            place = range(self._size)[index]
            return self[place : place + 1][0]
        begin, end, step = index.indices(self._size)
        if step != 1:
            raise ValueError("a remote file can be sliced without a step only")
        return self._blocks.read(self._file, self._size, begin, end) if begin < end else b""

    def find(self, part: bytes, begin: int = 0) -> int:
        """Return where the byte ``part`` is first, from ``begin`` on; -1 if it is nowhere.

        Raises:
            OSError: the file cannot be read.
        """
        step = _FIRST
        while begin < self._size:
            found: int = self[begin : begin + step].find(part)
            if found >= 0:
                return begin + found
            begin, step = begin + step, BLOCK
        return -1

    def read_ahead(self, begin: int, end: int) -> None:
        """Start fetching the blocks from ``begin`` to ``end`` (exclusive)."""
        for number in range(begin // BLOCK, -(-min(end, self._size) // BLOCK)):
            self._blocks.start(self._file, self._size, number)


class RemoteArray:
    """The numbers in a remote file. A slice fetches its bytes."""

    def __init__(self, content: RemoteBytes, dtype: str, skip: int = 0) -> None:
        """``skip``: bytes before the first number."""
        self._content, self._dtype, self._skip = content, numpy.dtype(dtype), skip
        self._length = max(len(content) - skip, 0) // self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole vector."""
        return self._length * self._dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Return a number, or consecutive ones.

        Raises:
            OSError: they cannot be fetched.
        """
        if not isinstance(index, slice):
            place = range(self._length)[int(index)]
            return self[place : place + 1][0]
        begin, end, step = index.indices(self._length)
        if step != 1:
            raise ValueError("the numbers of a remote file can be sliced without a step only")
        item, end = self._dtype.itemsize, max(begin, end)
        return numpy.frombuffer(self._content[self._skip + begin * item : self._skip + end * item], self._dtype)

    def __eq__(self, other: object) -> bool:
        """Refuse to compare: an ndarray would compare its elements, which are not here."""
        raise TypeError("the numbers of a remote file are fetched by slices: compare a slice")

    __hash__ = None  # type: ignore[assignment]


class FetchedBlocks:
    """The blocks of remote files that were used last.

    A reading fetches its own bytes. One in a block that another has touched before fetches the whole block, and the next
    blocks too where readings arrive in order: documents in random order cost what they weigh, and neighbours a request for
    many.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[str, int], Future[bytes] | None] = OrderedDict()
        """``None``: touched once."""

    def read(self, file: Any, size: int, begin: int, end: int) -> bytes:
        """Return the bytes ``begin`` to ``end`` of a file of ``size`` bytes.

        Raises:
            OSError: they cannot be fetched, or fewer arrive.
        """
        first, last = begin // BLOCK, max(end - 1, begin) // BLOCK
        if last - first > 1:
            return _fetch(file, begin, end)
        return b"".join(
            self._part(file, size, number, max(begin, number * BLOCK), min(end, (number + 1) * BLOCK))
            for number in range(first, last + 1)
        )

    def _part(self, file: Any, size: int, number: int, begin: int, end: int) -> bytes:
        key = (file.path, number)
        if key not in self._blocks:
            self._keep(key, None)
            return _fetch(file, begin, end)
        block = self._blocks[key]
        if block is None:
            ahead = _AHEAD if self._blocks.get((file.path, number - 1)) is not None else 0
            block = self.start(file, size, number)
            for following in range(number + 1, min(number + 1 + ahead, -(-size // BLOCK))):
                self.start(file, size, following)
        if key in self._blocks:
            self._blocks.move_to_end(key)
        try:
            content = block.result()
        except Exception:
            self._blocks.pop(key, None)  # the next attempt fetches it again
            raise
        return content[begin - number * BLOCK : end - number * BLOCK]

    def start(self, file: Any, size: int, number: int) -> Future[bytes]:
        """Start fetching a block, unless it is there."""
        block = self._blocks.get((file.path, number))
        if block is None:
            bounds = number * BLOCK, min((number + 1) * BLOCK, size)
            block = _threads().submit(_fetch, file, *bounds)
            self._keep((file.path, number), block)
        return block

    def _keep(self, key: tuple[str, int], block: Future[bytes] | None) -> None:
        self._blocks[key] = block
        self._blocks.move_to_end(key)
        while len(self._blocks) > _KEPT:
            self._blocks.popitem(last=False)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AHEAD + 1, "remote files")


def _fetch(file: Any, begin: int, end: int) -> bytes:
    with reading(file):
        content: bytes = file.fs.cat_file(file.path, start=begin, end=end)
    if len(content) != end - begin:
        raise OSError(f"{file}: {len(content):,} bytes arrived instead of {end - begin:,}")
    return content
