"""A new local folder that exists whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_core.api import UserError
from titan_core.toolkit.folder_lock import FolderLock
from titan_core.toolkit.own_files import remove_tree

PARTIAL = ".partial"
"""Suffix of the name of a folder that is not complete."""
_MARK = ".unfinished"
"""Name of a file in it, by which a later command knows that it may remove the folder."""
_STEP = re.compile(r"step-[0-9]+")


def require_new(target: Path, checkpoint: bool) -> None:
    """Require that ``target`` can become a new folder.

    Args:
        checkpoint: whether a checkpoint is going to be written, which must not pass for one of a run.

    Raises:
        UserError: it exists and is not empty, or has the name of a run's checkpoint.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError.one(str(target), "already exists and is not empty", "choose a new folder")
    if checkpoint and _STEP.fullmatch(target.name):
        why = "only a run may name the folders of its checkpoints step-N"
        raise UserError.one(str(target), why, "choose another name")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Return a folder beside ``target``, which is made durable and gets that name once the context exits without an error;
    otherwise it is removed.

    Raises:
        UserError: the folder cannot be written, or another process is writing it.
    """
    partial, lock = target.with_name(target.name + PARTIAL), FolderLock.beside(target, str(target))
    if os.path.lexists(partial) and not lock.was_left and not (partial / _MARK).is_file():
        raise UserError.one(str(partial), "is in the way, and not left by an interrupted command", "remove it, or rename it")
    with lock:
        try:
            remove_tree(partial)
            partial.mkdir(parents=True)
            (partial / _MARK).touch()
            yield partial
            (partial / _MARK).unlink()
            for path in (*(file for file in partial.rglob("*") if file.is_file()), partial):
                _sync(path)
            if target.exists():
                target.rmdir()
            partial.rename(target)
            _sync(target.parent)
        except OSError as error:
            why = f"cannot be written: {error.strerror or error}"
            raise UserError.one(str(target), why, "make space, or choose another location") from error
        finally:
            with suppress(OSError):
                remove_tree(partial)


def _sync(path: Path) -> None:
    """Make the contents of a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
