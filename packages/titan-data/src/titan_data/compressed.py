"""Reads compressed files through a decompressed copy, which one process of a machine makes once, in the cache folder.

The file objects of the compression libraries accept damaged files silently. The one of ``zstandard`` treats a truncated file
as complete and drops all frames but the first; those of ``bz2`` and ``lzma`` ignore any data after the last stream. This
module therefore walks the streams itself: each must be complete, and only another stream or the end of the file may follow.
"""

from __future__ import annotations

import bz2
import hashlib
import logging
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import zstandard

from titan_core.api import UserError
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.cache_folder import cache_folder
from titan_core.toolkit.files import open_file
from titan_data.limits import DEFAULT, KEY, TOGETHER
from titan_data.made_once import make_missing

log = logging.getLogger(__name__)

FOLDER: Final = "decompressed"

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".bz2": "bzip2"}
"""Names of the formats, by file suffix."""

_CHUNK = 1 << 14
_ZSTD_CHUNK = 1 << 11
"""Number of bytes to read at a time. Kept small for zstd, because four bytes may expand to 128 KiB."""

_PIECE = 1 << 20
"""Number of bytes that are decompressed at a time, where the library can stop."""
_FREE, _MOST_TIMES = 512 << 20, 100
"""Bytes that any file may become, and how many times its size beyond that. Text becomes ten times as large; what becomes a
thousand times as large fills the disk."""


class _Stream(Protocol):
    """A decompressor for one compressed stream (a gzip member, a zstd frame)."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _zstd(window: int) -> _Stream:
    # The library accepts powers of two. It allocates only what a file needs: `zstd --long=31` writes windows of 2 GiB.
    return zstandard.ZstdDecompressor(max_window_size=1 << min(window.bit_length() - 1, 31)).decompressobj()


_STREAMS: dict[str, Callable[[int], _Stream]] = {
    ".gz": lambda window: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS),
    ".zst": _zstd,
    ".zstd": _zstd,
    ".xz": lambda window: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=window),
    ".bz2": lambda window: bz2.BZ2Decompressor(),
}
"""Decompressors, by file suffix, whose window takes at most a number of bytes."""
_PADDED = (".gz", ".xz")
"""Formats that allow trailing zeros, which tapes and block devices add."""
_ERRORS = (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError)


class Damaged(Exception):
    """A compressed file is damaged; the message says how."""


def decompress(file: Path, limit: int = DEFAULT) -> Iterator[bytes]:
    """Yield the contents of ``file`` in pieces. Its suffix determines the format.

    Args:
        limit: bytes of a record; a window may take :data:`~titan_data.limits.TOGETHER` times as many.

    Raises:
        Damaged: the file has another format, is truncated, has extra data at its end, or its window is too large.
        OSError: the file cannot be read.
    """
    new, kind, window = _STREAMS[file.suffix], COMPRESSED[file.suffix], TOGETHER * limit
    stream: _Stream | None = new(window)
    done = 0  # number of complete streams
    with open_file(file) as packed:
        while data := packed.read(_ZSTD_CHUNK if kind == "zstd" else _CHUNK):
            while data:
                if stream is None:
                    data = data.lstrip(b"\0") if file.suffix in _PADDED else data
                    if not data:
                        break
                    stream = new(window)
                try:
                    yield from _pieces(stream, data, kind)
                except _ERRORS as error:
                    if "memory" in str(error).lower():
                        why = f"it needs a window of more than {TOGETHER} times {KEY}, {window:,} bytes: raise the key"
                        raise Damaged(f"{why} (`zstd --long=31` needs {KEY} = {-(-(1 << 31) // TOGETHER)})") from None
                    why = f"the data after the last stream is not {kind}" if done else f"not {kind}, or damaged"
                    raise Damaged(f"{why}: {error}") from None
                if not stream.eof:
                    break
                data, stream, done = stream.unused_data, None, done + 1
    if stream is not None:
        raise Damaged(f"the last {kind} stream is incomplete: the file is truncated or has extra data at its end")


def _pieces(stream: Any, data: bytes, kind: str) -> Iterator[bytes]:
    """Yield what ``data`` becomes, at most :data:`_PIECE` bytes at a time where the library can stop."""
    if kind == "zstd":
        yield stream.decompress(data)
        return
    while True:
        yield (piece := stream.decompress(data, _PIECE))
        data = stream.unconsumed_tail if kind == "gzip" else b""
        if stream.eof or (stream.needs_input if kind != "gzip" else not data and len(piece) < _PIECE):
            return


def decompressed(files: Sequence[Path], limit: int = DEFAULT) -> list[Path]:
    """Return ``files`` with each compressed file replaced by its decompressed copy.

    Args:
        limit: see :func:`decompress`.

    Raises:
        UserError: a file is damaged or has another format than its suffix says, or its copy cannot be written or is absurdly
            large.
        OSError: a file cannot be read.
    """
    packed = [file for file in files if file.suffix in COMPRESSED]
    make_missing([_Copy(file, limit) for file in packed])
    return [copy_of(file) if file in packed else file for file in files]


def copy_of(file: Path) -> Path:
    """Return where the decompressed copy of ``file`` is, once it has been made.

    Raises:
        OSError: the file cannot be found.
    """
    about = file.stat()
    # Version 2: copies made by version 1 may come from truncated files.
    key = hashlib.sha256(f"2:{file.resolve()}:{about.st_size}:{about.st_mtime_ns}".encode()).hexdigest()[:24]
    return cache_folder(FOLDER) / f"{key}-{file.stem}"


def damaged(file: Path, why: Damaged) -> UserError:
    """Return the error that reports a damaged file."""
    return UserError.one(
        str(file), f"cannot be decompressed as {COMPRESSED[file.suffix]}: {why}", "download it again, or fix its suffix"
    )


class _Copy:
    """The decompressed copy of a file."""

    def __init__(self, file: Path, limit: int) -> None:
        self._file, self.path, self._limit = file, copy_of(file), limit

    def open(self) -> bool:
        """See :class:`~titan_data.made_once.MadeFile`."""
        return self.path.exists()

    def make(self) -> None:
        """See :class:`~titan_data.made_once.MadeFile`.

        Raises:
            UserError: the file is damaged, or the copy cannot be written.
        """
        log.info("decompressing %s, once", self._file)
        try:
            most = max(_FREE, _MOST_TIMES * self._file.stat().st_size)
            with atomic_write(self.path) as part, part.open("wb") as plain:
                for piece in decompress(self._file, self._limit):
                    plain.write(piece)
                    if plain.tell() > most:
                        why = f"it becomes more than {_MOST_TIMES} times as large, {most:,} bytes"
                        raise UserError.one(str(self._file), why, "decompress it yourself, if it is not a bomb")
        except Damaged as error:
            raise damaged(self._file, error) from None
        except OSError as error:
            why = f"cannot be decompressed to {self.path.parent}: {error.strerror or error}"
            raise UserError.one(str(self._file), why, "free disk space, or set TITAN_CACHE_DIR") from error
