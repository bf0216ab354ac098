"""How far each rank is: one small file a rank in memory that the launcher reads, also after the rank was killed. Imports no
torch."""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_core.api import JobContext, hookimpl
from titan_core.toolkit.launching import OUTCOMES

if TYPE_CHECKING:
    from titan_core.api import Run, StepReport

_LAYOUT = struct.Struct("<qqqd")
_NAME = "rank-{}.progress"


@dataclass(frozen=True)
class Progress:
    """One rank's progress in an attempt."""

    begun: int
    """The step after which the attempt started."""
    started: int
    """The last step that the rank started."""
    completed: int
    """The last step that it completed."""
    time: float
    """When that changed, in seconds of ``time.monotonic()``: all processes of a machine share it, and nobody sets it."""

    @property
    def in_step(self) -> bool:
        """Whether the rank is in a step, rather than saving or validating between two."""
        return self.started > self.completed


class ProgressFile:
    """Writes the progress of this rank. A step costs two copies of 32 bytes, and no system call."""

    def __init__(self, context: JobContext[None]) -> None:
        self._folder = Path(os.environ[OUTCOMES])
        self._memory: mmap.mmap | None = None
        self._begun = self._completed = 0

    @hookimpl(tryfirst=True)
    def titan_train_start(self, run: Run) -> None:
        """Create the file. It appears whole, because the launcher may read it at any time."""
        self._begun = self._completed = run.step
        path = self._folder / _NAME.format(run.world.rank)
        new = path.with_suffix(".new")
        new.write_bytes(_LAYOUT.pack(run.step, run.step, run.step, time.monotonic()))
        with new.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        new.rename(path)

    @hookimpl(tryfirst=True)
    def titan_step_start(self, step: int) -> None:
        """Record that the step has begun."""
        self._write(step)

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """Record that the step is complete."""
        self._completed = report.step
        self._write(report.step)

    @hookimpl
    def titan_step_cancelled(self) -> None:
        """Record that no step is running: a last checkpoint or validation may follow."""
        self._write(self._completed)

    def _write(self, started: int) -> None:
        if self._memory is not None:
            _LAYOUT.pack_into(self._memory, 0, self._begun, started, self._completed, time.monotonic())


def read_progress(folder: Path) -> dict[int, Progress]:
    """Return the progress of the ranks that have begun to train, by rank."""
    found: dict[int, Progress] = {}
    for file in folder.glob(_NAME.format("*")):
        found[int(file.stem.removeprefix("rank-"))] = Progress(*_LAYOUT.unpack(file.read_bytes()))
    return found


@dataclass(frozen=True)
class StepLimits:
    """How long a step may take before the launcher ends its ranks: longer than the collectives that wait for a rank, so that
    these fail first, and name it."""

    first: float
    """Seconds, for the first step of an attempt."""
    later: float
    """Seconds, for every other step."""

    def exceeded(self, progress: dict[int, Progress], now: float) -> dict[int, float]:
        """Return the ranks whose step has taken too long, and its seconds so far.

        Args:
            now: seconds of ``time.monotonic()``.
        """
        late: dict[int, float] = {}
        for rank, one in progress.items():
            limit = self.first if one.completed == one.begun else self.later
            if one.in_step and now - one.time > limit:
                late[rank] = now - one.time
        return late
