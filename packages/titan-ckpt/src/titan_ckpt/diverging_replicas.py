"""Checkpoints of replicas whose weights diverge (local SGD)."""

from __future__ import annotations

import torch

from titan_ckpt.chunks import read_whole
from titan_ckpt.folder import Folder
from titan_ckpt.stored import MODEL, Manifest, of_replica
from titan_core.api import UserError


def require_equal_weights(folder: Folder, manifest: Manifest) -> None:
    """Require that all replicas in a checkpoint have the same weights, so that the first can represent all of them. Holds
    one weight of two replicas in memory at a time.

    Raises:
        UserError: replicas differ in a weight (the message names it), or a chunk is damaged.
    """
    if manifest.diverging_replicas == 1:
        return
    for name in manifest.tensors:
        if not name.startswith(f"{MODEL}."):
            continue
        first = read_whole(folder, manifest, name)
        for replica in range(1, manifest.diverging_replicas):
            if not torch.equal(first, read_whole(folder, manifest, of_replica(replica) + name)):
                why = f"its {manifest.diverging_replicas} replicas have different weights in {name}"
                raise UserError.one(str(folder), why, "use the checkpoint of a step that synchronised the replicas")
