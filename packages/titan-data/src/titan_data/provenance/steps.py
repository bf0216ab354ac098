"""The steps that used a document.

The order of an epoch is a function that can be inverted, so it is known which logical shard reads the document, and after
which others. In which step it does depends on the lengths of these others. One logical shard is therefore read, from the
newest checkpoint at which the document had not been read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from titan_core.api import DocumentPlace, SavedPosition, UserError
from titan_data.provenance.documents import Note, UsedDocument, used_documents
from titan_data.provenance.recorded_run import RecordedRun, Segment

_LONG: Final = 1000
"""Number of steps whose reading is worth a line."""


def steps_of_document(run: RecordedRun, place: str, note: Note = lambda line: None) -> list[tuple[int, UsedDocument]]:
    """Return the steps, up to the last that the run has recorded, that used tokens of a document, and which they used.

    Args:
        place: of the document, as :attr:`~titan_data.provenance.documents.UsedDocument.place`, or with the end of the path.

    Raises:
        UserError: no dataset of the run has such a document, or the order of none that might have it can be inverted; or
            the data has changed.
    """
    found: list[tuple[int, UsedDocument]] = []
    known, streams = False, list[str]()
    for segment in run.segments:
        for number, dataset in enumerate(segment.job.data.datasets):
            source: Any = segment.replay.sources[number]
            if not (hasattr(source, "find") and hasattr(source, "position")):
                streams.append(dataset.name)
                continue
            document = source.find(place, segment.job.data.plan.logical_shards)
            if document is not None:
                known = True
                run.require_known(0, run.last)
                found += _Search(segment, number, document, min(run.last, segment.last), note).uses()
    if not known and streams:
        why = f"the order of dataset {', '.join(map(repr, streams))} cannot be inverted to the steps that used a document"
        raise UserError.one(repr(place), why, "look for the document in `titan data step RUN N`")
    if not known:
        fix = "write the place as `titan data step` prints it, such as FILE:LINE for lines of JSON, or 'FILE, row N'"
        raise UserError.one(repr(place), "no dataset of the run has a document there", fix)
    return sorted(found, key=lambda use: (use[0], use[1].row))


@dataclass(frozen=True)
class _Search:
    """The search for a document of a dataset."""

    segment: Segment
    dataset: int
    document: DocumentPlace
    last: int
    """Number of the last step of the run, or of the segment."""
    note: Note

    def uses(self) -> list[tuple[int, UsedDocument]]:
        """Return the steps that used the document."""
        if self.last < self.segment.first:
            return []
        # Logical shards, each with other lengths of documents, may be in different epochs.
        epochs = self.segment.replay.last_epoch(self.dataset, self.last, self.segment.position(self.last))
        return [use for epoch in range(epochs + 1) for use in self._scan(epoch, self._begin(epoch))]

    def _begin(self, epoch: int) -> SavedPosition | None:
        """Return the newest position at which the document was surely unread in ``epoch``, or where the segment begins;
        ``None``: the beginning of the data."""
        begin = self.segment.begin
        low, high = self.segment.first - 1, self.last - 1  # of steps after which there may be a newer one
        while low < high:
            middle = (low + high + 1) // 2
            found = self.segment.position(middle)
            if found is None or found.step <= low:
                low = middle
            elif self._may_be_read(epoch, found):
                high = found.step - 1
            else:
                begin, low = found, middle
        return begin

    def _may_be_read(self, epoch: int, after: SavedPosition) -> bool:
        """Return whether the document may have been read in ``epoch`` before ``after``. Restoring a position may read
        documents again, and packing reads some in advance: what has been read is known after a sequence of the dataset."""
        shard, position = self._position(self.document, epoch)
        for _, rows in zip(range(after.step, self.last), self.segment.replay.read([shard], after), strict=False):
            if self.dataset in rows.datasets:
                now, current = self.segment.replay.reached(self.dataset, shard)
                return (now, self._position(current, now)[1] if current is not None else -1) >= (epoch, position)
        return True

    def _scan(self, epoch: int, after: SavedPosition | None) -> Iterator[tuple[int, UsedDocument]]:
        """Yield the uses of the document in ``epoch``, from ``after`` on."""
        shard, _ = self._position(self.document, epoch)
        begin, used = self.segment.first - 1 if after is None else after.step, 0
        dataset = self.segment.job.data.datasets[self.dataset].name
        for step, rows in zip(range(begin + 1, self.last + 1), self.segment.replay.read([shard], after), strict=False):
            if step == begin + _LONG:
                self.note(f"epoch {epoch + 1}: reading the data of a logical shard from step {begin + 1} on")
            for use in used_documents(self.segment, rows, [shard]):
                if use.dataset == dataset and use.epoch == epoch and use.place == self.document.text:
                    yield step, use
                    used += use.tokens
                    if used == use.of:
                        return

    def _position(self, document: DocumentPlace, epoch: int) -> tuple[int, int]:
        """Return the logical shard that reads ``document`` in ``epoch``, and its position there."""
        source: Any = self.segment.replay.sources[self.dataset]
        found: tuple[int, int] = source.position(document.index, self.segment.job.data.plan.logical_shards, epoch)
        return found
