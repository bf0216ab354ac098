"""Files that one process of a machine makes, while others wait. Processes that need the same files divide them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from titan_core.toolkit.own_files import no_link


class MadeFile(Protocol):
    """A file in the cache folder."""

    @property
    def path(self) -> Path:
        """Where it is."""

    def open(self) -> bool:
        """Return whether the file exists, intact; mark it as used."""

    def make(self) -> None:
        """Make the file."""


def make_missing(files: Sequence[MadeFile]) -> None:
    """Make the files that do not exist; other processes may be doing the same. Raises what :meth:`MadeFile.make` raises."""
    missing = [file for file in files if not file.open()]
    while missing:
        others = []
        for file in missing:
            with _locked(file.path, wait=False) as mine:
                if not mine:
                    others.append(file)
                elif not file.open():
                    file.make()
        if len(others) == len(missing):
            with _locked(others[0].path, wait=True):
                pass
        missing = [file for file in others if not file.open()]


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Lock the making of ``path`` against other processes; yield whether it is locked, or cannot be.

    Args:
        wait: until it is not locked by another process.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            stream = open(lock, "w", opener=no_link)  # noqa: SIM115 - closed below
        except OSError:  # the folder cannot be written, and no other process will
            yield True
            return
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            except OSError:  # a file system without locks: each process makes its own
                yield True
                return
            if not _is_at(stream.fileno(), lock):
                continue  # its holder has removed it meanwhile, and another process may have locked the next one
            try:
                yield True
            finally:
                lock.unlink(missing_ok=True)
            return


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file ``descriptor`` is still the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
