"""Removing checkpoints, and setting checkpoints and exports aside. A removal that is interrupted leaves nothing that could
pass for a checkpoint. Does not import torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from titan_ckpt.config import CheckpointSection
from titan_ckpt.format.catalogue import checkpoint_folder, entry, step_folder, steps_in
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.stored import NAME, UNFINISHED, is_own_file
from titan_core.api import JobContext
from titan_core.toolkit.text import shorten

log = logging.getLogger(__name__)
STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_ASIDE: Final = re.compile(r"aside-([0-9]+)-step-[0-9]+")


class Retention:
    """Removes checkpoints of a run that the retention policy does not keep."""

    def __init__(self, folder: Folder, keep_latest: int, keep_every: int) -> None:
        """See :func:`to_remove`."""
        self._folder, self._keep_latest, self._keep_every = folder, keep_latest, keep_every
        self._complete: set[int] = set()  # read each manifest once: a large model has a large one

    def prune(self, newest: int, in_use: Collection[int] = ()) -> None:
        """Apply the retention policy after the checkpoint of ``newest`` was saved, while no older one is being saved.

        Args:
            in_use: steps whose checkpoints are being read, and are removed another time.

        Raises:
            OSError: a file cannot be removed.
        """
        # After checkpoint.load_step, later checkpoints belong to the abandoned part of the run. They do not count here, and
        # only the user removes them.
        steps = [step for step in steps_in(self._folder) if step <= newest]
        folders = {step: step_folder(self._folder, step) for step in steps}
        self._complete |= {step for step in steps if step not in self._complete and entry(folders[step], step).manifest}
        complete = [step for step in steps if step in self._complete]
        unwanted = to_remove(complete, self._keep_latest, self._keep_every)
        # Remove leftovers of interrupted saves. Checkpoints that are damaged or lost their manifest stay for inspection.
        older = (step for step in steps if step < max(complete, default=-1) and step not in self._complete)
        unwanted += [step for step in older if entry(folders[step], step).unfinished]
        for step in unwanted:
            if step not in in_use:
                remove(self._folder, step)


def to_remove(complete: Sequence[int], keep_latest: int, keep_every: int) -> list[int]:
    """Return the steps, out of those in ``complete``, whose checkpoints to remove.

    Args:
        keep_latest: number of newest checkpoints to keep; 0 keeps all.
        keep_every: never remove steps that are a multiple of this number; 0 disables the rule.
    """
    if keep_latest == 0:
        return []
    older = sorted(complete, reverse=True)[keep_latest:]
    return [step for step in older if not (keep_every and step % keep_every == 0)]


def make_room(folder: Folder, step: int) -> str | None:
    """Make room for a new checkpoint of ``step``. A complete checkpoint of the same step and the leftovers of an interrupted
    save are removed; anything else (a damaged checkpoint, data that lost its manifest) is moved aside.

    Returns:
        The path that the old contents were moved to, or ``None``.

    Raises:
        OSError: the old contents cannot be removed or moved.
    """
    checkpoint = step_folder(folder, step)
    found = entry(checkpoint, step)
    if found.manifest is not None or found.unfinished:
        remove(folder, step)
        return None
    others = set(folder.list())
    aside = next(name for number in range(1, len(others) + 2) if (name := f"{checkpoint.name}.aside-{number}") not in others)
    checkpoint.rename(aside)
    return str(folder / aside)


def remove(folder: Folder, step: int) -> None:
    """Remove the checkpoint of ``step``: first the manifest, last the file that marks the folder as unfinished. What Titan
    has not written there stays, and so does what a link leads to."""
    checkpoint = step_folder(folder, step)
    if checkpoint.is_link:
        checkpoint.remove_all()
        return
    names = [name for name in checkpoint.list() if is_own_file(name)]
    if names:
        if UNFINISHED not in names:
            checkpoint.write(UNFINISHED, b"")
        checkpoint.remove(NAME)
        if checkpoint.is_local:
            checkpoint.sync()
        checkpoint.remove(*(name for name in names if name != UNFINISHED))
        checkpoint.remove(UNFINISHED)
    if others := checkpoint.list():
        log.warning("%s is not empty: Titan has not written %s", checkpoint, shorten(", ".join(others)))
    else:
        checkpoint.remove_all()


def export_folder(context: JobContext[CheckpointSection]) -> Path:
    """Return the folder of the exports of the job's checkpoints."""
    return (Path(context.job.dump_folder) / context.section.export_folder).resolve()


def target(folder: Path, step: int) -> Path:
    """Return where the export of ``step`` is."""
    return folder / f"step-{step}"


def exported_steps(folder: Path) -> list[int]:
    """Return the steps of the exports in ``folder``, newest first. What is set aside is none of them."""
    return sorted((int(match[1]) for path in folder.iterdir() if (match := STEP.fullmatch(path.name))), reverse=True)


def set_aside(context: JobContext[CheckpointSection], step: int) -> list[str]:
    """Rename the checkpoints of steps after ``step``, and their exports, to ``aside-N-step-M``, where N is the first number
    that is free, and return their new paths. The newest goes first: if this is interrupted, the run stands at another of its
    steps."""
    folder, exports = checkpoint_folder(context.job.dump_folder, context.section.folder), export_folder(context)
    exported = exports if context.section.export is not None and exports.is_dir() else None
    names = [*folder.list(), *(() if exported is None else (path.name for path in exported.iterdir()))]
    number, moved = _last(names) + 1, []
    for later in (one for one in steps_in(folder) if one > step):
        name = f"aside-{number}-step-{later}"
        step_folder(folder, later).rename(name)
        moved.append(str(folder / name))
    # Also those whose checkpoints are not kept any more.
    for later in () if exported is None else (one for one in exported_steps(exported) if step < one):
        place = exports / f"aside-{number}-step-{later}"
        target(exports, later).rename(place)
        moved.append(str(place))
    return moved


def _last(names: Iterable[str]) -> int:
    return max((int(match[1]) for name in names if (match := _ASIDE.fullmatch(name))), default=0)
