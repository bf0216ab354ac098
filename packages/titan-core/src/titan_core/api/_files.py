"""Opening files that others may have written. A pipe or a device in the place of a file might never end, a link might lead
to a file that its author must not see, and a file might be larger than memory: what is not a regular file is refused, and
so is what is too long to be read whole.

Errors are ``OSError`` with a reason in ``strerror``, as those of the system are, so one handler reports both.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

LONGEST: Final = 16 * 2**20
"""Bytes of a file that is read whole, unless the caller allows more: a config, a template, an index of a few thousand files.
Its values take at most fifty times as much memory once they are parsed."""
LONGEST_TABLE: Final = 64 * 2**20
"""Bytes of a file with an entry for each token, tensor or part of a dataset. The largest vocabularies take 34 MB."""


def open_file(path: str | Path, *, inside: Path | None = None, buffering: int = -1) -> BinaryIO:
    """Open a regular file to read its bytes. Never waits for a writer, as opening a pipe does.

    Args:
        inside: the folder that must contain the file, links resolved. A folder in ``snapshots`` of a hub's cache, at any
            depth, whose files are links, contains the folder ``blobs`` beside ``snapshots`` too.
        buffering: as of :func:`open`.

    Raises:
        OSError: it does not exist, cannot be read, is no regular file, or is outside of ``inside``.
    """
    remote: Any = path
    if hasattr(remote, "fs"):  # of an object store, which has neither pipes nor links
        return cast(BinaryIO, remote.open("rb") if buffering < 0 else remote.open("rb", buffering=buffering))
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    if inside is not None:
        path, flags = _resolved(Path(path), inside), flags | os.O_NOFOLLOW
    descriptor = os.open(path, flags)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            pipe = ", but a pipe: write its contents to a file" if stat.S_ISFIFO(kind) else ""  # `titan train <(...)`
            raise OSError(errno.EINVAL, f"is not a regular file{pipe}", str(path))
        return os.fdopen(descriptor, "rb", buffering)
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | Path, *, longest: int = LONGEST, inside: Path | None = None) -> bytes:
    """Return the contents of a regular file.

    Raises:
        OSError: see :func:`open_file`; or it is longer than ``longest`` bytes.
    """
    with open_file(path, inside=inside) as file:
        content = file.read(longest + 1) if _size(file) <= longest else b""
        if len(content) > longest or _size(file) > longest:  # files of /proc have no size
            raise OSError(errno.EFBIG, f"is longer than {longest:,} bytes", str(path))
        return content


def read_text(path: str | Path, *, longest: int = LONGEST, inside: Path | None = None, errors: str = "strict") -> str:
    """Return the UTF-8 text in a regular file, with line ends as :meth:`pathlib.Path.read_text` converts them.

    Raises:
        OSError: see :func:`read_bytes`.
        UnicodeDecodeError: it is not UTF-8, unless ``errors`` says otherwise.
    """
    text = read_bytes(path, longest=longest, inside=inside).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def regular(path: Path, *, inside: Path | None = None) -> Path:
    """Return ``path``, for a library that opens it itself.

    Raises:
        OSError: see :func:`open_file`.
    """
    open_file(path, inside=inside).close()
    return path


def _size(file: BinaryIO) -> int:
    try:
        return os.fstat(file.fileno()).st_size
    except OSError:  # of an object store
        return 0


def _resolved(path: Path, folder: Path) -> Path:
    real, folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    blobs = [above.parent / "blobs" for above in folder.parents if above.name == "snapshots"]
    if not any(real.is_relative_to(home) for home in [folder, *(home for home in blobs if not home.is_symlink())]):
        raise OSError(errno.EPERM, f"is a link to a file outside of {folder}", str(path))
    return real
