"""Going back to an earlier step of a run, and leaving out documents from there on.

Titan's stream is a function of seed, data and step, so the steps after the rewind are those of a run that has passed over
the documents from its first step, unless earlier epochs have read them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_core.api import Checkpoint, CommandContext, Problem, SavedPosition, UserError
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.json_lines import LineFile, read_lines, records_of
from titan_core.toolkit.runs.files import EVENTS, EXCLUDED, METRICS
from titan_data.provenance.documents import Note, documents_of_steps
from titan_data.provenance.recorded_run import RecordedRun, Segment
from titan_data.provenance.steps import steps_of_document


@dataclass(frozen=True, order=True)
class Excluded:
    """A document to pass over."""

    dataset: str
    index: int
    place: str
    """Where it is, for messages."""


@dataclass(frozen=True)
class Rewound:
    """What a rewind has done."""

    documents: Sequence[Excluded]
    """The documents that are passed over from now on, and were not before."""
    again: int
    """How many of them earlier epochs have read."""
    aside: Sequence[str]
    """The checkpoints of later steps, and what was made of them."""


def documents_in_steps(
    run: RecordedRun, begin: int, steps: Collection[int], note: Note
) -> tuple[list[Excluded], list[Excluded]]:
    """Return the documents of which some of ``steps`` used tokens: those that the run had not begun after step ``begin``,
    and those that it had.

    Raises:
        UserError: a document is of a stream, so it has no index; or the documents cannot be read
            (:func:`~titan_data.provenance.documents.documents_of_steps`).
    """
    used, begun, seen = set(), set(), set()
    for step, documents in documents_of_steps(run, begin + 1, max(steps, default=begin), note):
        for one in documents:
            if one.index is None:
                if step not in steps:
                    continue
                why = "is a stream, whose documents cannot be passed over"
                raise UserError.one(f"dataset {one.dataset!r}, step {step}", why, "name documents of other datasets")
            document = Excluded(one.dataset, one.index, one.place or "")
            if (document, one.epoch) not in seen and one.first_token:
                begun.add(document)
            seen.add((document, one.epoch))
            if step in steps:
                used.add(document)
    return sorted(used - begun), sorted(used & begun)


def documents_at(run: RecordedRun, places: Iterable[str], step: int, note: Note) -> list[Excluded]:
    """Return the documents at ``places``.

    Args:
        step: the step to go back to.

    Raises:
        UserError: there is none, or a step up to ``step`` has used it.
    """
    found, problems = [], []
    for place in places:
        uses = steps_of_document(run, place, note)
        first = min((number for number, _ in uses), default=step + 1)
        if first <= step:
            why = f"step {first} used it, which is before the run goes back to"
            problems.append(Problem(place, why, f"rewind to a step before {first}, or leave it in"))
        found += [Excluded(used.dataset, used.index, place) for _, used in uses if used.index is not None][:1] or _unread(
            run, place
        )
    if problems:
        raise UserError(*problems)
    return sorted(set(found))


def _unread(run: RecordedRun, place: str) -> list[Excluded]:
    """Return the document at ``place``, which no step has used."""
    segment = run.segments[-1]
    for dataset, source in zip(segment.job.data.datasets, segment.replay.sources, strict=True):
        find: Any = getattr(source, "find", None)
        document = find(place, segment.job.data.plan.logical_shards) if find is not None else None
        if document is not None:
            return [Excluded(dataset.name, document.index, place)]
    return []


def rewind(
    context: CommandContext, run: RecordedRun, step: int, documents: Sequence[Excluded], reached: int = 0
) -> Rewound:  # fmt: skip
    """Let the next start of the run continue from the checkpoint of ``step``, without ``documents``. Nothing is deleted.

    Args:
        reached: a step that the run has taken, whether its files have it or not.

    Raises:
        UserError: there is no such checkpoint, or a document has been read before it.
    """
    segment = run.segment_of(step + 1)
    saved, checkpoint = _saved(segment, step)
    known = {name: set(indices) for name, indices in segment.job.data.excluded.items()}
    new = [one for one in documents if one.index not in known.get(one.dataset, ())]
    for one in new:
        known.setdefault(one.dataset, set()).add(one.index)
    again = _require_unread(context, segment, saved, known) if new else 0
    if new:
        before = read_lines(run.path / EXCLUDED) if (run.path / EXCLUDED).exists() else []
        lines = [*before, *({"dataset": one.dataset, "index": one.index, "place": one.place} for one in new)]
        with atomic_write(run.path / EXCLUDED) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert checkpoint.set_aside is not None
    aside = checkpoint.set_aside.load()(checkpoint.context(segment.job), step)
    begin = max(reached, step, _last_step(run))
    log = LineFile(run.path / EVENTS)
    log.append({"event": "rewind", "time": time.time(), "step": step, "from": begin, "documents": len(new)})
    log.close()
    return Rewound(new, again, aside)


def _last_step(run: RecordedRun) -> int:
    """Return the last step that the files of the run have since it went back the last time; 0 if there is none."""
    events = read_lines(run.path / EVENTS)
    before = max((number for number, event in enumerate(events) if event["event"] == "rewind"), default=-1)
    logged = (record for _, record in records_of(run.path / METRICS))
    return max((int(one["step"]) for one in itertools.chain(events[before + 1 :], logged)), default=0)


def _saved(segment: Segment, step: int) -> tuple[SavedPosition, Checkpoint]:
    """Return the position in the checkpoint of ``step``.

    Raises:
        UserError: there is none.
    """
    checkpoint = segment.job.checkpoint
    if not isinstance(checkpoint, Checkpoint) or checkpoint.find_position is None or checkpoint.set_aside is None:
        raise UserError.one("titan run rewind", "the run's checkpoints do not support it", "use titan-ckpt's")
    found = checkpoint.find_position.load()(checkpoint.context(segment.job), step)
    if found is None or found.step != step:
        newest = "it has none before" if found is None else f"the newest before is of step {found.step}"
        fix = "choose a saved step (`titan checkpoint list`)"
        raise UserError.one(f"--to {step}", f"the run has no checkpoint of this step; {newest}", fix)
    return found, checkpoint


def _require_unread(context: CommandContext, segment: Segment, saved: SavedPosition, excluded: dict[str, set[int]]) -> int:
    """Require that the excluded documents are not among those that the stream holds at the position: it is read from there
    without them. Return how many streams of datasets with excluded documents are beyond their first epoch.

    Raises:
        UserError: the position is within one of the documents.
    """
    data = replace(segment.job.data, excluded={name: frozenset(indices) for name, indices in excluded.items()})
    replay = context.replay(replace(segment.job, data=data))
    names = {dataset.name: number for number, dataset in enumerate(data.datasets)}
    try:
        replay.position_after(saved.step + 1, saved)
    except UserError as error:
        why = "a document to pass over is in use there: earlier steps have used a part of it, or it is packed with others"
        fix = "rewind to an earlier checkpoint, or leave its documents in"
        raise UserError.one(f"--to {saved.step}", why, fix) from error
    positions: Any = saved.state["shards"]
    return sum(
        any(position["streams"][names[name]]["epoch"] > 0 for position in positions.values())
        for name in excluded
        if name in names
    )
