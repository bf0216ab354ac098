"""A run as it has recorded itself: its job, its data, and the positions in the data that its checkpoints hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from titan_core.api import Checkpoint, CommandContext, SavedPosition, UserError
from titan_core.toolkit.jobs import AssembledJob, Override
from titan_core.toolkit.reading import DataReplay
from titan_core.toolkit.runs.files import CONFIG
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.sections import MOST_STEPS


@dataclass(frozen=True)
class Segment:
    """Successive steps of a run that read one stream of data."""

    job: AssembledJob
    replay: DataReplay
    first: int = 1
    """Number of its first step."""
    _found: dict[int, SavedPosition | None] = field(default_factory=dict, repr=False, compare=False)

    def position(self, step: int) -> SavedPosition | None:
        """Return the newest position in the data that a checkpoint of the segment holds, after at most ``step`` steps.

        Raises:
            UserError: it belongs to other data.
        """
        if step not in self._found:
            self._found[step] = self._find(step)
        return self._found[step]

    def _find(self, step: int) -> SavedPosition | None:
        checkpoint = self.job.checkpoint
        if not isinstance(checkpoint, Checkpoint) or checkpoint.find_position is None or step < self.first:
            return None
        found = checkpoint.find_position.load()(checkpoint.context(self.job), step)
        if found is None or found.step < self.first:
            return None
        self.replay.require_same(found)
        return found


@dataclass(frozen=True)
class RecordedRun:
    """A run, which may still be training."""

    path: Path
    segments: Sequence[Segment]
    """In order. A run that was interrupted reads one stream all the same."""

    @cached_property
    def last(self) -> int:
        """Number of the last step that the run has recorded, in its metrics, events or checkpoints; 0 if it has none."""
        metrics = (record["step"] for record in RunLog.read_metrics(self.path))
        events = (event["step"] for event in RunLog.read_events(self.path))
        saved = self.segments[-1].position(MOST_STEPS)
        return max(max(metrics, default=0), max(events, default=0), saved.step if saved is not None else 0)

    def segment_of(self, step: int) -> Segment:
        """Return the segment with ``step``, which is at least 1."""
        return next(segment for segment in reversed(self.segments) if segment.first <= step)


def open_run(context: CommandContext, folder: str) -> RecordedRun:
    """Open the data of the run in ``folder``. The command's overrides apply, for example to the path of data that has moved.

    Raises:
        UserError: the folder contains no run, or its data cannot be opened.
    """
    path = Path(folder)
    if not RunLog.read_config(path):
        why = f"has no {CONFIG}"
        raise UserError.one(f"run {folder!r}", why, "pass a run's directory (job.dump_folder)")
    context.arguments.recipe = str(path / CONFIG)
    # The size of the global batch may follow from the number of ranks.
    starts = [event for event in RunLog.read_events(path) if event["event"] == "start"]
    ranks = starts[-1]["world_size"] if starts else None
    job = context.job(ranks, [Override("job.dump_folder", str(path))])
    return RecordedRun(path, [Segment(job, context.replay(job))])
