"""Files that other processes see either complete or not at all."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a hidden, empty file beside ``path`` to write to. On exit it replaces ``path``, unless the block raises. Creates
    parent directories. The file has the mode that the umask gives to new files, whatever the library that writes it sets.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is unique to this process because several ranks may write the same file.
    part = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)  # of a killed process with the same id
        part.touch(exist_ok=False)
        mode = part.stat().st_mode & 0o777
        yield part
        if part.stat().st_mode & 0o777 != mode:  # safetensors, for one, gives its files mode 0600
            part.chmod(mode)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
