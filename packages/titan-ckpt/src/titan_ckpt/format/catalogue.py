"""Listing and reading the checkpoints of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import read_manifest
from titan_ckpt.format.stored import NAME, UNFINISHED, BrokenCheckpoint, IncompleteCheckpoint, Manifest
from titan_core.api import UserError

DCP_METADATA = ".metadata"
"""Name of the file that every folder of ``torch.distributed.checkpoint`` contains."""
_OF_DCP = "it was written by torch.distributed.checkpoint, not by Titan: convert it with `titan checkpoint convert`"
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


def checkpoint_folder(dump_folder: str, folder: str) -> Folder:
    """Return the folder of a run's checkpoints.

    Args:
        dump_folder: the run's directory.
        folder: ``checkpoint.folder``.
    """
    return Folder(folder) if "://" in folder or folder.startswith("/") else Folder(dump_folder) / folder


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
        if step >= 0 and folder.is_link:
            raise BrokenCheckpoint("it is a link: name the folder that it leads to, or remove it")
        manifest = read_manifest(folder)
        named = _STEP.fullmatch(folder.name)
        if named and int(named[1]) != manifest.step:
            why = f"it is the checkpoint of step {manifest.step}, but its folder is named {folder.name}: was it renamed?"
            raise BrokenCheckpoint(why)
        return Entry(step, folder, manifest)
    except IncompleteCheckpoint as error:
        names = folder.list()
        if DCP_METADATA in names:
            return Entry(step, folder, None, _OF_DCP)
        return Entry(step, folder, None, str(error), unfinished=UNFINISHED in names or not names)
    except BrokenCheckpoint as error:
        return Entry(step, folder, None, str(error))


def find_checkpoints(path: str) -> Folder:
    """Return the folder of checkpoints for ``path``, which is that folder, one of its checkpoints, or a run's directory.

    Raises:
        UserError: there are no checkpoints.
    """
    folder = Folder(path.rstrip("/") or path)
    if NAME in folder.list():
        return folder.parent
    for candidate in (folder, folder / "checkpoint"):
        if steps_in(candidate):
            if candidate != folder and candidate.is_link:
                raise UserError.one(str(candidate), "is a link", "name the folder that it leads to")
            return candidate
    if DCP_METADATA in folder.list():
        raise UserError.one(path, _OF_DCP)
    raise UserError.one(path, "there are no checkpoints here", "pass a run's directory, or its folder of checkpoints")


def checkpoints_at(path: str) -> list[Entry]:
    """Return the checkpoints of the run at ``path``, newest first. If ``path`` is a checkpoint that belongs to no run (for
    example a converted one), return only that checkpoint.

    Raises:
        UserError: there are no checkpoints.
    """
    folder = Folder(path.rstrip("/") or path)
    found = list(entries(find_checkpoints(path)))
    if NAME not in folder.list() or any(checkpoint.folder.name == folder.name for checkpoint in found):
        return found
    single = entry(folder, -1)
    return [single if single.manifest is None else replace(single, step=single.manifest.step)]


def _newest_complete(folder: Folder) -> Entry:
    reason = ""
    for found in entries(folder):
        if found.manifest is not None:
            return found
        reason = reason or f" ({found.folder.name}: {found.problem})"
    return Entry(-1, folder, None, f"no checkpoint here is complete{reason}")


def pick(path: str, step: int | None) -> Entry:
    """Return the checkpoint of ``step`` at ``path``; without a step the newest complete one, or ``path`` itself if it is a
    checkpoint.

    Raises:
        UserError: there is no such checkpoint, or it is not complete.
    """
    own = Folder(path.rstrip("/"))
    if step is None and NAME in own.list():
        found = entry(own, -1)
    elif step is None:
        folder = find_checkpoints(path)
        found = _newest_complete(folder)
    else:
        found = entry(step_folder(find_checkpoints(path), step), step)
    if found.manifest is None:
        raise UserError.one(str(found.folder), found.problem, "to see all checkpoints, run `titan checkpoint list`")
    return found
