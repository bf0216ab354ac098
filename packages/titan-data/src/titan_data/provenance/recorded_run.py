"""A run as it has recorded itself: its job, its data, and the positions in the data that its checkpoints hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from titan_core.api import Checkpoint, CommandContext, SavedPosition, UserError, matches
from titan_core.api.config.numbers import MOST_STEPS
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.reading import DataReplay
from titan_core.toolkit.runs.files import CONFIG, PREVIOUS, digest_of
from titan_core.toolkit.runs.run_log import RunLog

CHANGES: Final = ("data.mixture", "dataset.*.weight")
"""What may differ between the streams of two segments, beside the batch and the length of sequences."""


@dataclass(frozen=True)
class Segment:
    """Successive steps of a run that read one stream of data."""

    job: AssembledJob
    replay: DataReplay
    first: int = 1
    """Number of its first step."""
    last: int = MOST_STEPS
    """Number of its last step."""
    before: Segment | None = None

    @cached_property
    def begin(self) -> SavedPosition | None:
        """The position in the data before the first step; ``None``: the beginning of the data.

        Raises:
            UserError: the data of an earlier segment has changed.
        """
        if self.before is None:
            return None
        step = self.first - 1
        return replace(self.before.replay.position_after(step, self.before.position(step)), changed=CHANGES)

    def position(self, step: int) -> SavedPosition | None:
        """Return the newest position in the data that is known without reading the segment, after at most ``step`` steps:
        from a checkpoint of the segment, or :attr:`begin`.

        Raises:
            UserError: it belongs to other data.
        """
        checkpoint, begin = self.job.checkpoint, self.first - 1
        step = min(step, self.last)
        if step < begin:
            return None
        if isinstance(checkpoint, Checkpoint) and checkpoint.find_position is not None:
            found = checkpoint.find_position.load()(checkpoint.context(self.job), step)
            if found is not None and found.step >= max(1, begin):
                # The checkpoint that it began with is of the segment before, or of the run that this one was branched off.
                found = replace(found, changed=CHANGES) if found.step == begin else found
                self.replay.require_same(found)
                return found
        return self.begin


@dataclass(frozen=True)
class RecordedRun:
    """A run, which may still be training."""

    path: Path
    segments: Sequence[Segment]
    """In order. A run that was interrupted reads one stream all the same."""
    accepted: Sequence[int] = ()
    """The steps, in order, at which the run started again and accepted other documents in its datasets, if there were any
    (``checkpoint.allow_changed``)."""

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

    def checkpoint_before(self, step: int) -> SavedPosition | None:
        """Return the newest checkpoint of a step before ``step``, whatever its data; ``None`` if there is none."""
        job = self.segment_of(step).job
        if not isinstance(job.checkpoint, Checkpoint) or job.checkpoint.find_position is None:
            return None
        return job.checkpoint.find_position.load()(job.checkpoint.context(job), step - 1)

    def require_known(self, after: int, step: int) -> None:
        """Require that the data of the steps from ``after`` + 1 to ``step`` is what it is now. Where the run accepted other
        documents, only a checkpoint of the steps between shows it.

        Raises:
            UserError: the data has changed, or no checkpoint shows that it has not.
        """
        for begin, end in zip((0, *self.accepted), (*self.accepted, MOST_STEPS), strict=True) if self.accepted else ():
            if end <= after or begin >= step:
                continue
            saved = self.checkpoint_before(end + 1)
            if saved is None or saved.step <= begin:
                steps = f"from {begin + 1} on" if end == MOST_STEPS else f"{begin + 1} to {end}"
                change = begin or end
                why = f"the start from step {change} accepted other documents (checkpoint.allow_changed), and none of its "
                why += f"checkpoints shows what steps {steps} read"
                raise UserError.one(
                    f"run {str(self.path)!r}, step {step}", why, "name a step after a checkpoint of these steps"
                )
            self.segment_of(saved.step).replay.require_same(saved)


def open_run(context: CommandContext, folder: str) -> RecordedRun:
    """Open the data of the run in ``folder``. The command's overrides apply, for example to the path of data that has moved.

    Raises:
        UserError: the folder contains no run, or its data cannot be opened.
    """
    path = Path(folder)
    if not RunLog.read_config(path):
        why = f"has no {CONFIG}"
        raise UserError.one(f"run {folder!r}", why, "pass a run's directory (job.dump_folder)")
    segments: list[Segment] = []
    accepted: list[int] = []
    job, last = None, None
    for begun, config, ranks in _starts(path):
        if job is None or last != (config, ranks):
            context.arguments.recipe = str(config)
            job, last = context.job(ranks, [Override("job.dump_folder", str(path))]), (config, ranks)
            for stage in context.stages(job):
                first = max(begun, stage.first_step) + 1
                if first <= stage.end_step:
                    _append(segments, stage, first, context)
        accepted = [step for step in accepted if step < begun]
        if begun and _accepts_other_documents(job):
            accepted.append(begun)
    return RecordedRun(path, segments, accepted)


def _accepts_other_documents(job: AssembledJob) -> bool:
    """Return whether ``job`` continues a run although files or its tokenizer have other contents than before."""
    section = job.checkpoint.section_in(job.config) if job.checkpoint is not None else None
    allowed = getattr(section, "allow_changed", ())
    keys = [f"dataset.{one.name}.{aspect}" for one in job.data.datasets for aspect in ("content", "documents")]
    return any(matches(key, allowed) for key in ("model.tokenizer", *keys))


def _append(segments: list[Segment], job: AssembledJob, first: int, context: CommandContext) -> None:
    """Let ``job`` train the steps from ``first`` on, those of later segments too: its attempt began after theirs."""
    while segments and segments[-1].first >= first:
        segments.pop()
    if segments and _stream_of(job) == _stream_of(segments[-1].job):
        segments[-1] = replace(segments[-1], last=MOST_STEPS)
        return
    before = None
    if segments:
        before = segments[-1] = replace(segments[-1], last=first - 1)
    segments.append(Segment(job, context.replay(job), first, MOST_STEPS, before))


def _starts(path: Path) -> list[tuple[int, Path, int | None]]:
    """Return the step after which each attempt began, with its config and its number of ranks, from which the size of the
    global batch may follow."""
    kept = [path / CONFIG, *(path / PREVIOUS).glob(f"*/{CONFIG}")]
    files = {digest_of(file): file for file in reversed(kept)}
    found: list[tuple[int, Path, int | None]] = []
    for event in (event for event in RunLog.read_events(path) if event["event"] == "start"):
        if event["step"] == 0:
            found.clear()
        found.append((event["step"], files.get(event.get("config", ""), path / CONFIG), event["world_size"]))
    return found or [(0, path / CONFIG, None)]


def _stream_of(job: AssembledJob) -> tuple[object, ...]:
    """Return what the stream of ``job`` depends on, wherever its config was."""
    spec, plan = job.data, job.data.plan
    datasets = tuple((one.name, one.weight, replace(one.context, where="", split_key="")) for one in spec.datasets)
    order = spec.seed, spec.shuffle, spec.shuffle_buffer, spec.packing_window
    return datasets, order, plan.global_size, plan.logical_shards, plan.seq_len
