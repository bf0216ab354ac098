"""Compressed local files, read through a decompressed copy that is made once and kept in the cache of ``datasets``.

The libraries' own file objects accept damage without a word: ``zstandard``'s takes a file that ends in the middle for a
whole one and drops all frames but the first, and those of ``bz2`` and ``lzma`` ignore whatever follows the last stream. So
the streams of a file are walked here: each must end, and be followed by another or by the end of the file.
"""

from __future__ import annotations

import bz2
import hashlib
import lzma
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import zstandard

from titan_core.api.errors import UserError

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}
"""Endings, and the formats' names."""

_CHUNK = 1 << 14
"""Bytes that are decompressed at a time. Small, since a byte may stand for a thousand."""

_ZSTD_WINDOW = 1 << 31
"""The largest window that ``zstd --long=31`` makes, as large corpora are published. Memory is taken as a file needs it."""


class _Stream(Protocol):
    """One compressed stream (a member, a frame), as the libraries' decompressors have it."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


_STREAMS: dict[str, Callable[[], _Stream]] = {
    ".gz": lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".bz2": bz2.BZ2Decompressor,
}
_PADDED = (".gz", ".xz")
"""Formats that may be followed by zeros (of tapes and blocks)."""
_ERRORS = (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError)


class Damaged(Exception):
    """What is wrong with a compressed file."""


def decompress(file: Path) -> Iterator[bytes]:
    """The contents of ``file``, piece by piece, by the format that its ending names.

    Raises:
        Damaged: it is not what its name says, ends in the middle, or something else follows.
        OSError: it cannot be read.
    """
    new, kind = _STREAMS[file.suffix], COMPRESSED[file.suffix]
    stream: _Stream | None = new()
    done = 0  # whole streams
    with file.open("rb") as packed:
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
                    where = f"what follows the end of its data is no {kind}" if done else f"is no {kind}, or damaged"
                    raise Damaged(f"{where}: {error}") from None
                if not stream.eof:
                    break
                data, stream, done = stream.unused_data, None, done + 1
    if stream is not None:
        raise Damaged(f"ends in the middle of its {kind} data: truncated, or something follows it")


def decompressed(files: Sequence[Path]) -> list[Path]:
    """``files``, each compressed one replaced by its copy.

    Raises:
        UserError: a file is damaged or not what its name says, or there is no room for the copy.
    """
    return [_copy(file) if file.suffix in COMPRESSED else file for file in files]


def damaged(file: Path, why: Damaged) -> UserError:
    """The error of a file that cannot be used."""
    return UserError.one(
        str(file), f"cannot be decompressed as {COMPRESSED[file.suffix]}: {why}", "fetch it again, or rename it"
    )


def _copy(file: Path) -> Path:
    import datasets

    about = file.stat()
    # 2: copies of earlier versions may be of truncated files.
    key = hashlib.sha256(f"2:{file.resolve()}:{about.st_size}:{about.st_mtime_ns}".encode()).hexdigest()[:24]
    copy = Path(datasets.config.HF_DATASETS_CACHE) / "decompressed" / f"{key}-{file.stem}"
    if copy.exists():
        return copy
    partial = copy.with_name(f"{copy.name}.{uuid.uuid4().hex}.partial")  # ranks may be at it at the same time
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as plain:
            for piece in decompress(file):
                plain.write(piece)
        partial.replace(copy)
    except Damaged as error:
        raise damaged(file, error) from None
    except OSError as error:
        why = f"cannot be decompressed to {copy.parent}: {error.strerror or error}"
        raise UserError.one(str(file), why, "make room, or set HF_DATASETS_CACHE") from error
    finally:
        partial.unlink(missing_ok=True)
    return copy
