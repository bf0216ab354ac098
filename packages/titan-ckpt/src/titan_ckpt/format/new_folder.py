"""A new local folder that exists whole or not at all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_core.api import UserError
from titan_core.toolkit.folder_lock import FolderLock

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
    """Return a folder beside ``target``, which gets that name once the context exits without an error; otherwise it is
    removed.

    Raises:
        UserError: the folder cannot be written, or another process is writing it.
    """
    with FolderLock.beside(target, str(target)):
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            yield partial
            if target.exists():
                target.rmdir()
            partial.rename(target)
        except OSError as error:
            why = f"cannot be written: {error.strerror or error}"
            raise UserError.one(str(target), why, "make space, or choose another location") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
