"""The checkpoints of a run."""

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
    """A folder that is, or should be, a checkpoint."""

    step: int
    folder: Folder
    manifest: Manifest | None
    problem: str = ""
    """Why it cannot be used, where there is no manifest."""
    unfinished: bool = False
    """Whether it is what an interrupted save, or an interrupted removal, has left: nothing is lost with it."""


def step_folder(folder: Folder, step: int) -> Folder:
    """Where the checkpoint of ``step`` is."""
    return folder / f"step-{step}"


def steps_in(folder: Folder) -> list[int]:
    """Steps that have a folder, the newest first."""
    matches = (_STEP.fullmatch(name) for name in folder.list())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def entries(folder: Folder) -> Iterator[Entry]:
    """What is in ``folder``, the newest first, each read when it is needed."""
    for step in steps_in(folder):
        yield entry(step_folder(folder, step), step)


def entry(folder: Folder, step: int) -> Entry:
    """The checkpoint in ``folder``."""
    try:
        manifest = read_manifest(folder)
        named = _STEP.fullmatch(folder.name)
        if named and int(named[1]) != manifest.step:
            why = f"it is the checkpoint of step {manifest.step}, in a folder named {folder.name}: was it renamed?"
            raise BrokenCheckpoint(why)
        return Entry(step, folder, manifest)
    except IncompleteCheckpoint as error:
        names = folder.list()
        return Entry(step, folder, None, str(error), unfinished=UNFINISHED in names or not names)
    except BrokenCheckpoint as error:
        return Entry(step, folder, None, str(error))
