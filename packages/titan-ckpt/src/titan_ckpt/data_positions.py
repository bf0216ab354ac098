"""Reading where a run stood in its data, for commands that read the data again. Does not import torch."""

from __future__ import annotations

from titan_ckpt.config import CheckpointSection
from titan_ckpt.format.catalogue import checkpoint_folder, entry, step_folder, steps_in
from titan_core.api import JobContext, SavedPosition


def find_position(context: JobContext[CheckpointSection], step: int) -> SavedPosition | None:
    """Return the position in the data in the run's newest complete checkpoint of at most ``step`` steps; ``None`` if there
    is none. Checkpoints of weights alone have no position."""
    folder = checkpoint_folder(context.job.dump_folder, context.section.folder)
    for found in (one for one in steps_in(folder) if one <= step):
        checkpoint = step_folder(folder, found)
        manifest = entry(checkpoint, found).manifest
        if manifest is not None and not manifest.model_only:
            return SavedPosition(found, manifest.state["loader"], checkpoint=str(checkpoint))
    return None
