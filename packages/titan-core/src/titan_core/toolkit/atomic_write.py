"""Files that other processes see either complete or not at all."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_core.api import UserError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a hidden, empty file beside ``path`` to write to. On exit it replaces ``path``, unless the block raises. Creates
    parent directories. The file has the mode that the umask gives to new files, whatever the library that writes it sets.

    Raises:
        OSError: the file cannot be written.
    """
    part = _hidden(path)
    try:
        part.touch(exist_ok=False)
        mode = part.stat().st_mode & 0o777
        yield part
        if part.stat().st_mode & 0o777 != mode:  # safetensors, for one, gives its files mode 0600
            part.chmod(mode)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def require_writable(path: Path, where: str) -> None:
    """Check that :func:`atomic_write` can write ``path``, before the work of which it is to hold the result.

    Args:
        where: the option that names the file.

    Raises:
        UserError: it cannot.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        part = _hidden(path)
        part.touch()
        part.unlink()
    except OSError as error:
        raise UserError.one(where, f"cannot be written: {error.strerror}", "choose another file") from None


def _hidden(path: Path) -> Path:
    """Return the path of a file beside ``path``, whose folder then exists, and remove what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is unique to this process because several ranks may write the same file.
    part = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    part.unlink(missing_ok=True)  # of a killed process with the same id
    return part
