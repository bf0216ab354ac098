"""The documents of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from titan_core.api import UserError
from titan_core.api.config.numbers import MOST_STEPS
from titan_core.toolkit.reading import StepRows, UsedTokens
from titan_data.provenance.recorded_run import RecordedRun, Segment

Note = Callable[[str], None]
"""Shows a line about work that may take long."""


@dataclass(frozen=True)
class UsedDocument:
    """Successive tokens of a document in a sequence of a step."""

    dataset: str
    """Name of the dataset."""
    index: int | None
    """Number of the document in its dataset, or of the group that is read together; ``None`` for a stream."""
    place: str | None
    """The file, and the line, row or record in it; ``None`` if the dataset's plugin does not say."""
    row: int
    """Number of the sequence in the global batch, from 0."""
    first_token: int
    """Number of the first of the tokens in the document, from 0."""
    tokens: int
    of: int
    """Number of tokens of the document."""
    epoch: int
    """Number of times that the logical shard had been read to its end before the document was read."""
    shard: int
    """Number of the logical shard."""


def documents_of_step(run: RecordedRun, step: int, note: Note = lambda line: None) -> list[UsedDocument]:
    """Return what the global batch of ``step`` consists of, in order: for each sequence its documents. The same on any mesh.

    Args:
        step: number of the step, from 1.

    Raises:
        UserError: see :func:`documents_of_steps`.
    """
    ((_, documents),) = documents_of_steps(run, step, step, note)
    return documents


def documents_of_steps(
    run: RecordedRun, first: int, last: int, note: Note = lambda line: None
) -> Iterator[tuple[int, list[UsedDocument]]]:
    """Yield the steps ``first`` to ``last`` with what their global batches consist of.

    Raises:
        UserError: see :func:`rows_of_steps`.
    """
    for step, segment, rows in rows_of_steps(run, first, last, note):
        yield step, list(used_documents(segment, rows))


def rows_of_steps(
    run: RecordedRun, first: int, last: int, note: Note = lambda line: None
) -> Iterator[tuple[int, Segment, StepRows]]:
    """Yield the steps ``first`` to ``last`` with their segments and the rows of their global batches.

    The data is read from the newest checkpoint before the first step, or from the beginning.

    Raises:
        UserError: the run's data or its settings have changed, or the data ended before the last step.
    """
    while first <= last:
        segment = run.segment_of(first)
        after = segment.position(first - 1)
        if after is None:
            segment.position(MOST_STEPS)  # raises if the data has changed since any checkpoint
        begin = segment.first - 1 if after is None else after.step
        # Without a checkpoint, the position has been read from an earlier one, or from the beginning.
        run.require_known(begin if after is not None and after.checkpoint is not None else 0, min(last, segment.last))
        if first - begin > 1:
            origin = "the beginning: no checkpoint is older" if after is None else f"the checkpoint of step {begin}"
            note(f"reading {first - begin} steps of data, from {origin}")
        steps = segment.replay.read(range(segment.job.data.plan.logical_shards), after)
        end = min(last, segment.last)
        for step in range(begin + 1, end + 1):
            rows = next(steps, None)
            if rows is None or rows.ended:
                raise UserError.one(f"step {step}", "the data ends before it", "name an earlier step")
            if step >= first:
                yield step, segment, rows
        first = end + 1


def used_documents(segment: Segment, rows: StepRows, shards: Sequence[int] | None = None) -> Iterator[UsedDocument]:
    """Yield what ``rows`` consist of.

    Args:
        shards: the logical shards that the rows are of, in order; ``None``: all.
    """
    plan = segment.job.data.plan
    per_shard = plan.global_size // plan.logical_shards
    for number, (dataset, pieces) in enumerate(zip(rows.datasets, rows.used, strict=True)):
        within, at = divmod(number, per_shard)
        shard = within if shards is None else shards[within]
        for piece in _joined(pieces):
            place = piece.document.place
            yield UsedDocument(
                dataset=segment.job.data.datasets[dataset].name,
                index=place.index if place is not None else None,
                place=place.text if place is not None else None,
                row=shard * per_shard + at,
                first_token=piece.first,
                tokens=piece.tokens,
                of=piece.document.tokens,
                epoch=piece.document.epoch,
                shard=shard,
            )


def _joined(pieces: Sequence[UsedTokens]) -> Iterator[UsedTokens]:
    """Yield ``pieces``, with each that continues the one before joined to it, such as the parts of a document."""
    last: UsedTokens | None = None
    for piece in pieces:
        if last is not None and piece.document is last.document and piece.first == last.first + last.tokens:
            last = replace(last, tokens=last.tokens + piece.tokens)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
