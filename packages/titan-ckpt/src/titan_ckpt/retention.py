"""Which checkpoints to remove, and how: a checkpoint that is half removed is none."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ckpt.catalogue import entry, step_folder, steps_in
from titan_ckpt.folder import Folder
from titan_ckpt.stored import NAME, UNFINISHED


class Retention:
    """Removes the checkpoints of a run that are not to be kept any longer."""

    def __init__(self, folder: Folder, keep_latest: int, keep_every: int) -> None:
        """See :func:`to_remove`."""
        self._folder, self._keep_latest, self._keep_every = folder, keep_latest, keep_every
        self._complete: set[int] = set()  # a manifest is read once: those of large models are large

    def prune(self, newest: int) -> None:
        """Remove what need not be kept beside the checkpoint of ``newest``, which was just made; nothing is being written.

        Raises:
            OSError: something cannot be removed.
        """
        # Later ones belong to what was left with checkpoint.load_step: they neither count nor are they this run's to remove.
        steps = [step for step in steps_in(self._folder) if step <= newest]
        folders = {step: step_folder(self._folder, step) for step in steps}
        self._complete |= {step for step in steps if step not in self._complete and entry(folders[step], step).manifest}
        complete = [step for step in steps if step in self._complete]
        unwanted = to_remove(complete, self._keep_latest, self._keep_every)
        # What interrupted saves have left. What is damaged, or has lost its manifest, stays for its owner to look at.
        older = (step for step in steps if step < max(complete, default=-1) and step not in self._complete)
        unwanted += [step for step in older if entry(folders[step], step).unfinished]
        for step in unwanted:
            remove(self._folder, step)


def to_remove(complete: Sequence[int], keep_latest: int, keep_every: int) -> list[int]:
    """Steps to remove of those that are ``complete``.

    Args:
        keep_latest: how many of the newest to keep; 0 keeps all.
        keep_every: keep multiples of it for good; 0 keeps none so.
    """
    if keep_latest == 0:
        return []
    older = sorted(complete, reverse=True)[keep_latest:]
    return [step for step in older if not (keep_every and step % keep_every == 0)]


def make_room(folder: Folder, step: int) -> str | None:
    """Make room for the checkpoint of ``step``: remove an older one and what an interrupted save has left; move aside what
    is neither (a damaged checkpoint, data that lost its manifest).

    Returns:
        Where that was moved.

    Raises:
        OSError: it cannot be removed, or moved.
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
    """Remove the checkpoint of ``step``; what makes it one goes first, and what marks the rest as worthless goes last."""
    checkpoint = step_folder(folder, step)
    names = checkpoint.list()
    if names:
        if UNFINISHED not in names:
            checkpoint.write(UNFINISHED, b"")
        checkpoint.remove(NAME)
        if checkpoint.is_local:
            checkpoint.sync()
        for name in names:
            if name != UNFINISHED:
                (checkpoint / name).remove_all()
    checkpoint.remove_all()
