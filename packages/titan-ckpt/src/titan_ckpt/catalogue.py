"""The checkpoints of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from titan_ckpt.folder import Folder
from titan_ckpt.manifest import BrokenCheckpoint, Manifest, read_manifest

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Entry:
    """A folder that is, or should be, a checkpoint."""

    step: int
    folder: Folder
    manifest: Manifest | None
    problem: str = ""
    """Why it cannot be used, where there is no manifest."""


def step_folder(folder: Folder, step: int) -> Folder:
    """Where the checkpoint of ``step`` is."""
    return folder / f"step-{step}"


def steps_in(folder: Folder) -> list[int]:
    """Steps that have a folder, the newest first."""
    matches = (_STEP.fullmatch(name) for name in folder.list())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def entries(folder: Folder) -> Iterator[Entry]:
    """What is in ``folder``, the newest first, each read when it is asked for."""
    for step in steps_in(folder):
        yield entry(step_folder(folder, step), step)


def entry(folder: Folder, step: int) -> Entry:
    """The checkpoint in ``folder``."""
    try:
        return Entry(step, folder, read_manifest(folder))
    except BrokenCheckpoint as error:
        return Entry(step, folder, None, str(error))
