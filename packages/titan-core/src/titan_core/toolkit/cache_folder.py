"""Files that this machine can make again: in ``$TITAN_CACHE_DIR``, or in ``titan`` in the user's cache folder
(``$XDG_CACHE_HOME``, else ``~/.cache``). Free of torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from titan_core.toolkit.atomic_write import atomic_write

VARIABLE = "TITAN_CACHE_DIR"


def cache_folder(name: str) -> Path:
    """Return the folder of one kind of files. It may not exist yet."""
    root = os.environ.get(VARIABLE)
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan"
    return base / name


def cached_file(folder: Path, name: str, make: Callable[[Path], None], limit: int) -> Path:
    """Return the file ``name`` of ``folder``; if it does not exist, make it, and delete those that were used least recently.

    Several processes may make the same file; each sees it whole. A file that is deleted stays readable where it is mapped.

    Args:
        name: a name that says what the contents depend on, such as a hash.
        make: writes the contents to the file that it is given.
        limit: bytes that the folder may hold beside the new file.

    Raises:
        OSError: the folder cannot be written.
    """
    file = folder / name
    try:
        os.utime(file)  # used now
        return file
    except FileNotFoundError:
        pass
    with atomic_write(file) as part:
        make(part)
    _shrink(folder, file, limit)
    return file


def _shrink(folder: Path, newest: Path, limit: int) -> None:
    held = []
    for file in folder.iterdir():
        try:
            status = file.stat()
        except FileNotFoundError:
            continue  # deleted by another process
        if file != newest and not file.name.startswith("."):  # another process is writing a hidden one
            held.append((status.st_mtime_ns, status.st_size, file))
    room = limit
    for _, size, file in sorted(held, reverse=True):
        room -= size
        if room < 0:
            file.unlink(missing_ok=True)
