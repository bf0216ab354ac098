"""Checkpoints of copies of the weights that train apart (local SGD)."""

from __future__ import annotations

import torch

from titan_ckpt.chunks import read_whole
from titan_ckpt.folder import Folder
from titan_ckpt.stored import MODEL, Manifest, of_copy
from titan_core.api.errors import UserError


def require_equal_weights(folder: Folder, manifest: Manifest) -> None:
    """Compare the copies of each weight in a checkpoint, one weight in memory at a time. The first copy stands for all of
    them only if they are the same.

    Raises:
        UserError: naming a weight that is not the same in all copies; or a chunk is damaged.
    """
    if manifest.copies == 1:
        return
    for name in manifest.tensors:
        if not name.startswith(f"{MODEL}."):
            continue
        first = read_whole(folder, manifest, name)
        for copy in range(1, manifest.copies):
            if not torch.equal(first, read_whole(folder, manifest, of_copy(copy) + name)):
                why = f"its {manifest.copies} copies of the weights differ in {name}, and none of them stands for all"
                raise UserError.one(
                    str(folder), why, "take the checkpoint of a step after which the copies are brought together"
                )
