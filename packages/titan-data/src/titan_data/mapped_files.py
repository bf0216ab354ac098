"""Files in memory maps, of which a process keeps a bounded number, whatever the number of files.

A map in Python holds a file open, and so does every array in it. Documents that outlive the next read are therefore copied
once there are more files than maps (:func:`detached`).
"""

from __future__ import annotations

import itertools
import mmap
import resource
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final, cast

import numpy
from numpy.typing import NDArray

from titan_core.api import UserError
from titan_core.toolkit.files import open_file
from titan_data.remote_bytes import FetchedBlocks, RemoteArray, RemoteBytes
from titan_data.storage import is_remote, local

MOST: Final = 256
"""Maximum number of maps; fewer if the process may not open four times as many files."""
_numbers = itertools.count()


class _Pool:
    """The maps of this process that were used last, of all datasets."""

    def __init__(self) -> None:
        self._maps: OrderedDict[tuple[int, Path], mmap.mmap | bytes] = OrderedDict()
        self._arrays: dict[tuple[int, Path], dict[tuple[str, int], NDArray[Any]]] = {}  # of these maps
        self._lock = threading.RLock()  # reentrant, because a garbage collection may call forget() anywhere
        self.full = False
        """Whether there were ever more files than maps."""

    def content(self, key: tuple[int, Path], *, is_index: bool = False) -> mmap.mmap | bytes:
        with self._lock:
            found = self._maps.get(key)
            if found is not None:
                self._maps.move_to_end(key)
                if isinstance(found, mmap.mmap) and found.size() < len(
                    found
                ):  # reading beyond its end would end the process
                    why = f"was truncated while it was read: it had {len(found):,} bytes, and has {found.size():,}"
                    raise UserError.one(str(key[1]), why, "restore it, and do not write to the files of a running job")
                return found
            self._maps[key] = found = _map(key[1])
            if is_index and isinstance(found, mmap.mmap):
                # The kernel reads 128 KiB around each page that is touched, and a document needs 16 bytes of an index.
                found.madvise(mmap.MADV_RANDOM)
            if len(self._maps) > _most():
                self.full = True
                oldest, _ = self._maps.popitem(last=False)  # closed with the last array in it
                self._arrays.pop(oldest, None)
            return found

    def array(self, key: tuple[int, Path], dtype: str, skip: int, *, is_index: bool = False) -> NDArray[Any]:
        with self._lock:
            content = self.content(key, is_index=is_index)
            arrays = self._arrays.setdefault(key, {})
            found = arrays.get((dtype, skip))
            if found is None:
                arrays[dtype, skip] = found = _array(content, dtype, skip)
            return found

    def forget(self, number: int) -> None:
        with self._lock:
            for key in [key for key in self._maps if key[0] == number]:
                del self._maps[key]
                self._arrays.pop(key, None)


_pool = _Pool()


class MappedFiles:
    """The files of an opened dataset."""

    def __init__(self) -> None:
        self._number = next(_numbers)  # another dataset may have found other contents under the same name
        weakref.finalize(self, _pool.forget, self._number)
        self._blocks = FetchedBlocks()
        self._copies: dict[Path, Path] = {}
        self._remote: dict[Path, RemoteBytes] = {}

    def content(self, file: Path) -> mmap.mmap | bytes:
        """Return the contents of ``file``: of a remote one, a :class:`~titan_data.remote_bytes.RemoteBytes`, which fetches
        what is read.

        Raises:
            OSError: it cannot be opened.
            UserError: it has become shorter.
        """
        if is_remote(file):
            return cast(bytes, self._remote_bytes(file))
        return _pool.content((self._number, file))

    def array(self, file: Path, dtype: str, skip: int = 0) -> NDArray[Any]:
        """Return the contents of ``file`` after ``skip`` bytes, read-only; bytes at the end that are no whole item are left
        out. The caller keeps neither it nor parts of it that are not :func:`detached`. Of a remote file: a
        :class:`~titan_data.remote_bytes.RemoteArray`, which has a length, and fetches its slices.

        Raises:
            OSError: it cannot be opened.
        """
        if is_remote(file):
            return cast(NDArray[Any], RemoteArray(self._remote_bytes(file), dtype, skip))
        return _pool.array((self._number, file), dtype, skip)

    def read_ahead(self, file: Path, first: int, last: int) -> None:
        """Start reading bytes ``first`` to ``last`` (exclusive) of ``file`` in large requests, and do not wait.

        Raises:
            OSError: it cannot be opened.
        """
        content: Any = self.content(file)
        first, last = max(first, 0), min(last, len(content))  # a damaged index is reported when it is used
        if isinstance(content, RemoteBytes):
            content.read_ahead(first, last)
        elif last > first and isinstance(content, mmap.mmap):
            start = first // mmap.PAGESIZE * mmap.PAGESIZE
            content.madvise(mmap.MADV_WILLNEED, start, last - start)

    def index(self, file: Path, dtype: str, skip: int = 0) -> NDArray[Any]:
        """Return :meth:`array` of an index, from which each document needs a few bytes: of a remote one, of a copy in the
        cache of this machine.

        Raises:
            OSError: it cannot be fetched or opened.
        """
        if is_remote(file) and file not in self._copies:
            self._copies[file] = local(file)
        return _pool.array((self._number, self._copies.get(file, file)), dtype, skip, is_index=True)

    def _remote_bytes(self, file: Path) -> RemoteBytes:
        if file not in self._remote:
            self._remote[file] = RemoteBytes(file, self._blocks)
        return self._remote[file]


def mapped(file: Path, dtype: str, skip: int = 0) -> NDArray[Any]:
    """Return what :meth:`MappedFiles.array` returns, in a map of its own.

    Raises:
        OSError: it cannot be opened.
    """
    return _array(_map(file), dtype, skip)


def detached(array: NDArray[Any]) -> NDArray[Any]:
    """Return ``array``, part of a map, for keeping: a copy, unless all files of the process can be mapped at once."""
    if not _pool.full:
        return array
    copy = array.copy()
    copy.setflags(write=False)
    return copy


def _array(content: mmap.mmap | bytes, dtype: str, skip: int) -> NDArray[Any]:
    count = max(len(content) - skip, 0) // numpy.dtype(dtype).itemsize
    return numpy.frombuffer(content, dtype, count, skip) if count else numpy.empty(0, dtype)


def _map(file: Path) -> mmap.mmap | bytes:
    with open_file(file) as stream:
        empty = stream.seek(0, 2) == 0  # cannot be mapped
        return b"" if empty else mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _most() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(8, min(MOST, soft // 4))
