"""What titan-ckpt contributes."""

from __future__ import annotations

from titan_ckpt.config import CheckpointSection
from titan_core.components import Checkpoint
from titan_core.hookspecs import hookimpl
from titan_core.ref import Ref

api = (1, 0)


@hookimpl
def titan_checkpoints() -> list[Checkpoint]:
    return [
        Checkpoint(
            name="distributed",
            summary="each rank its shards, by torch.distributed.checkpoint; atomic, verified, for any mesh",
            config=CheckpointSection,
            active=lambda facts: facts.section(CheckpointSection).enable,
            build=Ref("titan_ckpt.store:build"),
        )
    ]
