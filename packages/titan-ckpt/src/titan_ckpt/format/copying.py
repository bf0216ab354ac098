"""Copying a whole checkpoint to another folder."""

from __future__ import annotations

import os

from titan_ckpt.format.folder import LONGEST, Folder, write_all
from titan_ckpt.format.manifest import read_manifest
from titan_ckpt.format.stored import NAME, UNFINISHED, Manifest
from titan_ckpt.format.tokenizer_files import stored_files, write_files

_BLOCK = 16 * 2**20


def copy_checkpoint(source: Folder, manifest: Manifest, target: Folder) -> None:
    """Copy the checkpoint in ``source`` to the new folder ``target``. Its files never change, so files on one file system
    become hard links, which take no space. The manifest comes last, as when a checkpoint is saved.

    Args:
        manifest: that of ``source``.

    Raises:
        OSError: a file cannot be read or written.
        BrokenCheckpoint: the copy is not whole, because files of ``source`` were changed or removed meanwhile.
    """
    target.make()
    target.write(UNFINISHED, b"")
    for name in manifest.files:
        if not _linked(source, target, name):
            _copy(source, target, name)
    write_files(target, stored_files(source, manifest))
    if target.is_local:
        target.sync()
    target.write(NAME, source.read(NAME, max(LONGEST, source.size(NAME) or 0)))  # it has been read before
    target.remove(UNFINISHED)
    read_manifest(target)


def _linked(source: Folder, target: Folder, name: str) -> bool:
    """Make a hard link, and return whether both folders are on one file system that has them."""
    old, new = source.local_path, target.local_path
    if old is None or new is None:
        return False
    try:
        os.link(old / name, new / name)
    except FileNotFoundError:
        raise
    except OSError:  # other file systems, and those without links, differ in the error
        return False
    return True


def _copy(source: Folder, target: Folder, name: str) -> None:
    with source.open(name) as old, target.create(name) as new:
        while block := old.read(_BLOCK):
            write_all(new, memoryview(block))
