"""Which checkpoints to remove, and how: a checkpoint that is half removed is none."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ckpt.catalogue import step_folder
from titan_ckpt.folder import Folder
from titan_ckpt.manifest import NAME


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
