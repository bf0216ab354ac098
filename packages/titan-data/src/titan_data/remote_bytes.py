"""Contents of files in an object store, fetched by range, with a bounded number of blocks in memory."""

from __future__ import annotations

from bisect import bisect_right, insort
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
_ANNOUNCED: Final = 1 << 30
"""Bytes that a process keeps of each dataset because they were announced and have not been read yet."""
_CELL: Final = 4096
"""Bytes of an announced range of which it is known whether any have been read."""


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
        """Start fetching the bytes ``begin`` to ``end`` (exclusive), and keep them until they have been read once."""
        self._blocks.announce(self._file, max(begin, 0), min(end, self._size))


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


class _Announced:
    """A range of bytes that will be read once, in any order."""

    def __init__(self, file: Any, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self._parts = [_threads().submit(_fetch, file, at, min(at + BLOCK, end)) for at in range(begin, end, BLOCK)]
        self._left = 0
        self._untouched = numpy.ones(-(-(end - begin) // _CELL), bool)

    def expect(self) -> None:
        """Remember that all bytes will be read (again)."""
        self._left += self.end - self.begin
        self._untouched[:] = True

    @property
    def done(self) -> bool:
        """Whether all has been read. Readers that look for the end of a document beyond it read some bytes twice, so the
        number of bytes alone does not tell."""
        return self._left <= 0 and not self._untouched.any()

    def read(self, begin: int, end: int) -> bytes:
        """Return some bytes.

        Raises:
            OSError: they could not be fetched.
        """
        begin, end = begin - self.begin, end - self.begin
        self._left -= end - begin
        self._untouched[begin // _CELL : -(-end // _CELL)] = False
        parts = range(begin // BLOCK, -(-end // BLOCK))
        return b"".join(self._parts[one].result()[max(begin - one * BLOCK, 0) : end - one * BLOCK] for one in parts)

    def cancel(self) -> None:
        """Fetch no more."""
        for part in self._parts:
            part.cancel()


class FetchedBlocks:
    """The blocks of remote files that were used last, and those that were announced.

    What was announced is fetched in large requests, and kept until it has been read. Any other reading fetches its own
    bytes. One in a block that another has touched before fetches the whole block, and the next blocks too where readings
    arrive in order: documents in random order cost what they weigh, and neighbours a request for many.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[str, int], Future[bytes] | None] = OrderedDict()
        """``None``: touched once."""
        self._announced: OrderedDict[tuple[str, int], _Announced] = OrderedDict()
        """By path and first byte."""
        self._begins: dict[str, list[int]] = {}
        """First bytes of the announced ranges of each file, sorted."""

    def read(self, file: Any, size: int, begin: int, end: int) -> bytes:
        """Return the bytes ``begin`` to ``end`` of a file of ``size`` bytes.

        Raises:
            OSError: they cannot be fetched, or fewer arrive.
        """
        found = []
        while begin < end:
            begins = self._begins.get(file.path, [])
            after = bisect_right(begins, begin)
            upto = min(end, begins[after]) if after < len(begins) else end
            announced = self._announced[file.path, begins[after - 1]] if after else None
            if announced is not None and begin < announced.end:
                upto = min(upto, announced.end)
                found.append(self._of(announced, file.path, begin, upto))
            else:
                found.append(self._own(file, size, begin, upto))
            begin = upto
        return found[0] if len(found) == 1 else b"".join(found)

    def _of(self, announced: _Announced, path: str, begin: int, end: int) -> bytes:
        try:
            content = announced.read(begin, end)
        except Exception:  # whatever the store raised: the caller decides, and must not get it from here again
            self._forget(path, announced.begin)  # the next attempt fetches its own bytes
            raise
        if announced.done:
            self._forget(path, announced.begin)
        return content

    def _forget(self, path: str, begin: int) -> None:
        self._announced.pop((path, begin)).cancel()
        self._begins[path].remove(begin)

    def announce(self, file: Any, begin: int, end: int) -> None:
        """Start fetching the bytes ``begin`` to ``end`` of a file, unless they were announced."""
        if begin >= end:
            return
        key = (file.path, begin)
        known = self._announced.get(key)
        if known is None or known.end != end:
            if known is not None:
                self._forget(*key)
            known = self._announced[key] = _Announced(file, begin, end)
            insort(self._begins.setdefault(file.path, []), begin)
        known.expect()
        self._announced.move_to_end(key)
        while sum(one.end - one.begin for one in self._announced.values()) > _ANNOUNCED and len(self._announced) > 1:
            self._forget(*next(iter(self._announced)))

    def _own(self, file: Any, size: int, begin: int, end: int) -> bytes:
        """Return bytes that were not announced."""
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
        except Exception:  # whatever the store raised, likewise
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
