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
from typing import Final, Protocol

import zstandard

from titan_core.api import UserError
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.cache_folder import cache_folder
from titan_core.toolkit.files import open_file
from titan_data.made_once import make_missing

log = logging.getLogger(__name__)

FOLDER: Final = "decompressed"

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".bz2": "bzip2"}
"""Names of the formats, by file suffix."""

_CHUNK = 1 << 14
"""Number of bytes to decompress at a time. Kept small, because one byte may expand to a thousand."""

_ZSTD_WINDOW = 1 << 31
"""The window of ``zstd --long=31``, used for large public corpora. The decompressor allocates only what a file needs."""


class _Stream(Protocol):
    """A decompressor for one compressed stream (a gzip member, a zstd frame)."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


_STREAMS: dict[str, Callable[[], _Stream]] = {
    ".gz": lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
    ".zstd": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".bz2": bz2.BZ2Decompressor,
}
_PADDED = (".gz", ".xz")
"""Formats that allow trailing zeros, which tapes and block devices add."""
_ERRORS = (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError)


class Damaged(Exception):
    """A compressed file is damaged; the message says how."""


def decompress(file: Path) -> Iterator[bytes]:
    """Yield the contents of ``file`` in pieces. Its suffix determines the format.

    Raises:
        Damaged: the file has another format, is truncated, or has extra data at its end.
        OSError: the file cannot be read.
    """
    new, kind = _STREAMS[file.suffix], COMPRESSED[file.suffix]
    stream: _Stream | None = new()
    done = 0  # number of complete streams
    with open_file(file) as packed:
        while data := packed.read(_CHUNK):
            while data:
                if stream is None:
                    data = data.lstrip(b"\0") if file.suffix in _PADDED else data
                    if not data:
                        break
                    stream = new()
                try:
                    yield stream.decompress(data)
                except _ERRORS as error:
                    why = f"the data after the last stream is not {kind}" if done else f"not {kind}, or damaged"
                    raise Damaged(f"{why}: {error}") from None
                if not stream.eof:
                    break
                data, stream, done = stream.unused_data, None, done + 1
    if stream is not None:
        raise Damaged(f"the last {kind} stream is incomplete: the file is truncated or has extra data at its end")


def decompressed(files: Sequence[Path]) -> list[Path]:
    """Return ``files`` with each compressed file replaced by its decompressed copy.

    Raises:
        UserError: a file is damaged or has another format than its suffix says, or its copy cannot be written.
        OSError: a file cannot be read.
    """
    packed = [file for file in files if file.suffix in COMPRESSED]
    make_missing([_Copy(file) for file in packed])
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

    def __init__(self, file: Path) -> None:
        self._file, self.path = file, copy_of(file)

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
            with atomic_write(self.path) as part, part.open("wb") as plain:
                for piece in decompress(self._file):
                    plain.write(piece)
        except Damaged as error:
            raise damaged(self._file, error) from None
        except OSError as error:
            why = f"cannot be decompressed to {self.path.parent}: {error.strerror or error}"
            raise UserError.one(str(self._file), why, "free disk space, or set TITAN_CACHE_DIR") from error
