"""Setting checkpoints aside, so that a run continues from an earlier one and none is lost. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from titan_ckpt.config import CheckpointSection
from titan_ckpt.format.catalogue import checkpoint_folder, step_folder, steps_in
from titan_ckpt.save.export_folder import export_folder, exported_steps, target
from titan_core.api import JobContext

_ASIDE: Final = re.compile(r"aside-([0-9]+)-step-[0-9]+")


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
