"""Which checkpoints to remove, and how: a checkpoint that is half removed is none."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ckpt.catalogue import entry, step_folder, steps_in
from titan_ckpt.folder import Folder
from titan_ckpt.manifest import NAME


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
        # What interrupted saves have left; what is damaged has its manifest.
        unwanted += [step for step in steps if step < max(complete, default=-1) and NAME not in folders[step].list()]
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


def remove(folder: Folder, step: int) -> None:
    """Remove the checkpoint of ``step``; what makes it one goes first."""
    checkpoint = step_folder(folder, step)
    checkpoint.remove(NAME)
    if checkpoint.is_local and checkpoint.list():
        checkpoint.sync()
    checkpoint.remove_all()
