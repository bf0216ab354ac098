"""The folder of a run's exports (``checkpoint.export``). Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

from titan_ckpt.config import CheckpointSection
from titan_core.api import JobContext

STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def export_folder(context: JobContext[CheckpointSection]) -> Path:
    """Return the folder of the exports of the job's checkpoints."""
    return (Path(context.job.dump_folder) / context.section.export_folder).resolve()


def target(folder: Path, step: int) -> Path:
    """Return where the export of ``step`` is."""
    return folder / f"step-{step}"


def exported_steps(folder: Path) -> list[int]:
    """Return the steps of the exports in ``folder``, newest first. What is set aside is none of them."""
    return sorted((int(match[1]) for path in folder.iterdir() if (match := STEP.fullmatch(path.name))), reverse=True)
