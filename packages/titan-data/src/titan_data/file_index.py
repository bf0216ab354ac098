"""Index of the documents in local files, made once for each file and kept in the cache folder.

An index belongs to a group of successive files, so that a hundred thousand small files need a few of them; its name is a
hash of their paths, sizes and times, and of a sample of their contents. Processes that open the same dataset divide the
groups among them by locks, and all of them map the result. A start thus reads the footers of the indexes, and only samples
of the files.

An index consists of 64-bit numbers: the values of all files, a checksum of each block of values, a table of the files, and
the footer. What has a wrong checksum is made again, a block when it is first used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import UserError
from titan_core.toolkit.cache_folder import cache_folder, cached_file
from titan_core.toolkit.files import open_file
from titan_core.toolkit.text import show_bytes
from titan_data.made_once import make_missing
from titan_data.mapped_files import MappedFiles, mapped
from titan_data.storage import is_remote, version

log = logging.getLogger(__name__)

Scan = Callable[[Path], Generator[NDArray[numpy.int64], None, tuple[int, int]]]
"""Yields the values of a file, some at a time; returns its number of documents, and a number of the caller's."""

FOLDER: Final = "file-index"
LIMIT: Final = 32 << 30
"""Maximum number of bytes of all indexes in the cache folder, beside the one that was made last."""
_GROUP: Final = 64 << 20
"""Bytes of small files that have one index between them."""
_SAMPLES, _SAMPLE = 8, 4096
_BLOCK: Final = 8192
"""Values with one checksum."""
_VERSION: Final = 1
_MAGIC: Final = int.from_bytes(b"titanidx", "little", signed=True)
_VALUE: Final = numpy.dtype("<i8")
_LOUD: Final = 1 << 30
"""Bytes from which on the log says that files are indexed."""


class _Damaged(Exception):
    """An index is damaged."""


class _Unreadable(Exception):
    """A file of the dataset, not of the cache, cannot be read."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class FileIndex:
    """The values and the number of documents of each of some files."""

    def __init__(self, files: Sequence[Path], kind: str, scan: Scan) -> None:
        """
        Args:
            kind: name and version of ``scan``.

        Raises:
            OSError: a file cannot be read.
        """
        self._files, self._maps = files, MappedFiles()
        about = [(file, file.stat()) for file in files]
        sizes = [status.st_size for _, status in about]
        self._groups = [
            _Group(files[first:last], _key(kind, about[first:last]), scan) for first, last in _divided(sizes, _GROUP)
        ]
        _make_missing(self._groups, sum(sizes))
        self._first = [0, *accumulate(len(group.files) for group in self._groups)]
        tables = [group.table for group in self._groups]
        self._documents = numpy.concatenate([table[0] for table in tables]) if tables else numpy.zeros(0, _VALUE)
        self.extra = numpy.concatenate([table[2] for table in tables]) if tables else numpy.zeros(0, _VALUE)
        """The number that ``scan`` returned for each file."""
        self.upto = self._documents.cumsum()
        """Number of documents up to the end of each file."""

    def documents(self, file: int) -> int:
        """Return the number of documents in file number ``file``."""
        return int(self._documents[file])

    def values(self, file: int, first: int = 0, last: int | None = None) -> NDArray[numpy.int64]:
        """Return values ``first`` to ``last`` (exclusive) of file number ``file``."""
        number = bisect_right(self._first, file) - 1
        group, place = self._groups[number], file - self._first[number]
        begin, end = group.range_of(place)
        end = end if last is None else min(begin + last, end)
        return group.values(self._maps, begin + first, end)


class _Group:
    """Files with one index."""

    def __init__(self, files: Sequence[Path], name: str, scan: Scan) -> None:
        self.files, self.name, self._scan = files, name, scan
        self._kept: NDArray[Any] | None = None  # contents of an index that cannot be kept
        self.table: NDArray[numpy.int64] = numpy.zeros((3, 0), _VALUE)
        """Number of documents, end of the values, and number of the caller's, of each file."""
        self._checksums: NDArray[numpy.int64] = numpy.zeros(0, _VALUE)
        self._checked: NDArray[numpy.bool_] = numpy.zeros(0, bool)

    @cached_property
    def path(self) -> Path:
        return cache_folder(FOLDER) / self.name

    def open(self) -> bool:
        """Read the footer; return whether there is an intact index."""
        try:
            with self.path.open("rb") as stream:
                self._read(stream)
            os.utime(self.path)  # used now
        except (_Damaged, ValueError):
            log.warning("%s: damaged, and made again", self.path)
            self.path.unlink(missing_ok=True)
            return False
        except OSError:
            return False
        return True

    def make(self) -> None:
        """Make the index. If the cache folder cannot be written, it goes to a temporary file that is deleted already.

        Raises:
            OSError: a file of the dataset cannot be read.
        """
        self._kept = None
        try:
            cached_file(cache_folder(FOLDER), self.name, self._write, LIMIT)
        except _Unreadable as error:
            raise error.error from None
        except OSError as error:
            log.warning("%s: %s: an index of the dataset is not kept, and is made at each start", self.path, error.strerror)
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "index")
                self._write(file)
                self._kept = mapped(file, _VALUE.str)
                with file.open("rb") as stream:
                    self._read(stream)
            return
        if not self.open():
            raise UserError.one(
                str(self.path), "is damaged as soon as it is written", "check the disk, or set TITAN_CACHE_DIR"
            )

    def range_of(self, place: int) -> tuple[int, int]:
        """Return the first and the end of the values of a file."""
        return int(self.table[1, place - 1]) if place else 0, int(self.table[1, place])

    def values(self, maps: MappedFiles, first: int, last: int) -> NDArray[numpy.int64]:
        """Return some values."""
        try:
            found = self._kept if self._kept is not None else maps.array(self.path, _VALUE.str)
        except FileNotFoundError:  # another process needed the room
            return self._made_again(first, last)
        for block in range(first // _BLOCK, -(-last // _BLOCK)):
            if not self._checked[block]:
                part = found[block * _BLOCK : min((block + 1) * _BLOCK, self._number)]
                if zlib.crc32(part.tobytes()) != self._checksums[block]:
                    return self._made_again(first, last)
                self._checked[block] = True
        return found[first:last]

    def _made_again(self, first: int, last: int) -> NDArray[numpy.int64]:
        before = self.table
        log.warning("%s: damaged or missing, and made again", self.path)
        self.path.unlink(missing_ok=True)
        self.make()
        if self._kept is None:
            self._kept = mapped(self.path, _VALUE.str)  # the pool has the old one
        if not numpy.array_equal(before, self.table):
            raise UserError.one(
                str(self.files[0]), "it, or a file after it, has changed while it was read", "restart the job"
            )
        return self._kept[first:last]

    def _write(self, path: Path) -> None:
        documents, ends, extra, checksums = [], [], [], []
        rest = b""
        number = 0
        size = _BLOCK * _VALUE.itemsize
        with path.open("wb") as out:
            for file in self.files:
                scan = self._scan(file)
                while True:
                    try:
                        values = next(scan)
                    except StopIteration as end:
                        found, other = end.value
                        break
                    except OSError as error:
                        raise _Unreadable(error) from error
                    number += len(values)
                    rest += values.astype(_VALUE).tobytes()
                    whole = len(rest) // size * size
                    checksums += [zlib.crc32(rest[at : at + size]) for at in range(0, whole, size)]
                    out.write(rest[:whole])
                    rest = rest[whole:]
                documents.append(found)
                ends.append(number)
                extra.append(other)
            if rest:
                checksums.append(zlib.crc32(rest))
                out.write(rest)
            tables = numpy.array([*checksums, *documents, *ends, *extra], _VALUE).tobytes()
            footer = numpy.array([number, len(self.files), zlib.crc32(tables), _MAGIC], _VALUE).tobytes()
            out.write(tables + footer)

    def _read(self, stream: BinaryIO) -> None:
        """
        Raises:
            _Damaged: the footer, or a table, is not what :meth:`_write` wrote.
        """
        size = stream.seek(0, os.SEEK_END) // _VALUE.itemsize
        if size < 4 or size * _VALUE.itemsize != stream.tell():
            raise _Damaged
        stream.seek(-4 * _VALUE.itemsize, os.SEEK_END)
        number, files, checksum, magic = numpy.frombuffer(stream.read(), _VALUE).tolist()
        blocks = -(-number // _BLOCK)
        if magic != _MAGIC or number < 0 or files != len(self.files) or size != number + blocks + 3 * files + 4:
            raise _Damaged
        stream.seek(number * _VALUE.itemsize)
        tables = stream.read((blocks + 3 * files) * _VALUE.itemsize)
        if zlib.crc32(tables) != checksum:
            raise _Damaged
        read = numpy.frombuffer(tables, _VALUE)
        self._number, self._checksums, self.table = number, read[:blocks], read[blocks:].reshape(3, files)
        self._checked = numpy.zeros(blocks, bool)


def _divided(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Divide files into groups of successive ones of at most ``most`` bytes, or of one file."""
    first = total = 0
    for number, size in enumerate(sizes):
        if number > first and total + size > most:
            yield first, number
            first, total = number, 0
        total += size
    if sizes:
        yield first, len(sizes)


def _key(kind: str, about: Sequence[tuple[Path, os.stat_result]]) -> str:
    """Return the name of the index of some files."""
    digest = hashlib.sha256(f"{_VERSION} {kind}".encode())
    if is_remote(about[0][0]):
        digest.update("\n".join(version(file) for file, _ in about).encode())
        return digest.hexdigest()[:40]
    for file, status in about:
        digest.update(f"{os.path.realpath(file)}\0{status.st_size} {status.st_mtime_ns}\n".encode())
    each = max(1, _SAMPLES // len(about))
    for number in range(0, len(about), -(-len(about) // _SAMPLES)):
        file, status = about[number]
        with open_file(file, buffering=0) as stream:
            for sample in range(each):
                stream.seek(max(0, status.st_size - _SAMPLE) * sample // max(1, each - 1))
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:40]


def _make_missing(groups: Sequence[_Group], size: int) -> None:
    """Make the indexes that do not exist."""
    missing = [group for group in groups if not group.open()]
    if missing and size > _LOUD:
        files = sum(len(group.files) for group in missing)
        log.info("locating the documents of %d files (of %s in all), once", files, show_bytes(size))
    make_missing(missing)
