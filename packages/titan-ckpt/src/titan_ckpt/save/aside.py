"""Setting checkpoints aside, so that a run continues from an earlier one and none is lost. Does not import torch."""

from __future__ import annotations

import re
from typing import Final

from titan_ckpt.config import CheckpointSection
from titan_ckpt.format.catalogue import checkpoint_folder, step_folder, steps_in
from titan_core.api import JobContext

_ASIDE: Final = re.compile(r"aside-([0-9]+)-step-[0-9]+")


def set_aside(context: JobContext[CheckpointSection], step: int) -> list[str]:
    """Rename the checkpoints of steps after ``step`` to ``aside-N-step-M``, where N is the first number that is free, and
    return their new paths. The newest goes first: if this is interrupted, the run stands at another of its steps."""
    folder = checkpoint_folder(context.job.dump_folder, context.section.folder)
    used = [int(match[1]) for name in folder.list() if (match := _ASIDE.fullmatch(name))]
    number, moved = max(used, default=0) + 1, []
    for later in (one for one in steps_in(folder) if one > step):
        name = f"aside-{number}-step-{later}"
        step_folder(folder, later).rename(name)
        moved.append(str(folder / name))
    return moved
