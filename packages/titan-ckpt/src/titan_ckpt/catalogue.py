"""Listing and reading the checkpoints of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from titan_ckpt.folder import Folder
from titan_ckpt.manifest import read_manifest
from titan_ckpt.stored import UNFINISHED, BrokenCheckpoint, IncompleteCheckpoint, Manifest

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Entry:
    """A folder that contains a checkpoint, or should."""

    step: int
    folder: Folder
    manifest: Manifest | None
    problem: str = ""
    """Why the checkpoint cannot be used, if ``manifest`` is ``None``."""
    unfinished: bool = False
    """Whether the folder is left over from an interrupted save or removal, so that removing it loses nothing."""


def step_folder(folder: Folder, step: int) -> Folder:
    """Return the folder of the checkpoint of ``step``."""
    return folder / f"step-{step}"


def steps_in(folder: Folder) -> list[int]:
    """Return the steps that have a folder, newest first."""
    matches = (_STEP.fullmatch(name) for name in folder.list())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def entries(folder: Folder) -> Iterator[Entry]:
    """Yield the checkpoints in ``folder``, newest first. Each manifest is read when its entry is requested."""
    for step in steps_in(folder):
        yield entry(step_folder(folder, step), step)


def entry(folder: Folder, step: int) -> Entry:
    """Read the checkpoint in ``folder``."""
    try:
        manifest = read_manifest(folder)
        named = _STEP.fullmatch(folder.name)
        if named and int(named[1]) != manifest.step:
            why = f"it is the checkpoint of step {manifest.step}, but its folder is named {folder.name}: was it renamed?"
            raise BrokenCheckpoint(why)
        return Entry(step, folder, manifest)
    except IncompleteCheckpoint as error:
        names = folder.list()
        return Entry(step, folder, None, str(error), unfinished=UNFINISHED in names or not names)
    except BrokenCheckpoint as error:
        return Entry(step, folder, None, str(error))
