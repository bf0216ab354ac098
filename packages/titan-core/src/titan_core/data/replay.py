"""The implementation of :class:`~titan_core.api.data.replay.DataReplay`. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from titan_core.api import DocumentShard, DocumentSource, TextTokenizer, UserError
from titan_core.api.data.dataset import DocumentPlace, State, StreamSpec
from titan_core.api.data.replay import SavedPosition, StepRows
from titan_core.data.positions import checked_positions
from titan_core.data.shards import ShardGroup
from titan_core.data.streams import stream_changes, stream_identity
from titan_core.toolkit.reading import place_of

if TYPE_CHECKING:
    from titan_core.api import Batch

_FIX = "restore what the run read"


class Replay:
    """See :class:`~titan_core.api.data.replay.DataReplay`."""

    def __init__(
        self,
        spec: StreamSpec,
        sources: Sequence[DocumentSource],
        tokenizer: TextTokenizer,
        document_mask: bool = False,
    ) -> None:
        """``document_mask``: see :func:`titan_core.data.batches.batch_of`."""
        self.sources = sources
        self._spec, self._tokenizer, self._document_mask = spec, tokenizer, document_mask
        self._followed: list[_Followed] = []

    def require_same(self, saved: SavedPosition) -> None:
        """See :class:`~titan_core.api.data.replay.DataReplay`."""
        refused, _ = stream_changes(self._spec, saved.state["stream_of"], self._stream, saved.changed)
        content = {change.key for change in refused if change.key.endswith(".content")}
        # A changed content says more than the number of its documents.
        problems = [one.problem for one in refused if f"{one.key.rpartition('.')[0]}.content" not in content - {one.key}]
        if problems:
            raise UserError(*dict.fromkeys(replace(problem, fix=_FIX) for problem in problems))

    @cached_property
    def _stream(self) -> State:
        return stream_identity(self._spec, self.sources, self._tokenizer)

    def read(self, shards: Iterable[int], after: SavedPosition | None = None) -> Iterator[StepRows]:
        """See :class:`~titan_core.api.data.replay.DataReplay`."""
        group = self._group(shards, after)
        while (rows := group.read()) is not None:
            yield rows

    def batch(self, rows: StepRows) -> Batch:
        """See :class:`~titan_core.api.data.replay.DataReplay`."""
        from titan_core.data.batches import batch_of  # imports torch

        return batch_of(self._spec, [rows], self._document_mask)

    def last_epoch(self, dataset: int, step: int, after: SavedPosition | None = None) -> int:
        """See :class:`~titan_core.api.data.replay.DataReplay`."""
        shards = range(self._spec.plan.logical_shards)
        group = self._read_up_to(step, after)
        # Streams that were restored, and not read since, have not read again the documents that they pack together.
        alone = [replace(one, weight=float(number == dataset)) for number, one in enumerate(self._spec.datasets)]
        ahead = ShardGroup(replace(self._spec, datasets=tuple(alone)), self._followed, self._tokenizer, shards)
        ahead.load_positions(group.positions())
        ahead.read()
        return max(epoch for epoch, _ in self._followed[dataset].newest.values())

    def position_after(self, step: int, after: SavedPosition | None = None) -> SavedPosition:
        """See :class:`~titan_core.api.data.replay.DataReplay`."""
        positions = self._read_up_to(step, after).positions()
        return SavedPosition(step, {"stream_of": self._stream, "shards": positions})

    def _read_up_to(self, step: int, after: SavedPosition | None) -> ShardGroup:
        group = self._group(range(self._spec.plan.logical_shards), after)
        for _ in range(step - (0 if after is None else after.step)):
            if group.read() is None:
                break
        return group

    def _group(self, shards: Iterable[int], after: SavedPosition | None) -> ShardGroup:
        self._followed = [_Followed(source) for source in self.sources]
        group = ShardGroup(self._spec, self._followed, self._tokenizer, shards, traced=True)
        if after is not None:
            self.require_same(after)
            self._load(group, after)
        return group

    def _load(self, group: ShardGroup, saved: SavedPosition) -> None:
        """
        Raises:
            UserError: the position is malformed, or the documents before it are not those that were read.
        """
        try:
            positions = checked_positions(saved.state, group.positions(), self._stream)
        except ValueError as error:
            where = f"the position in the data in the checkpoint of step {saved.step}"
            raise UserError.one(where, str(error), "verify the checkpoint (`titan checkpoint verify`)") from None
        size = self._spec.plan.global_size
        others = {position["global_size"] for position in positions.values()} - {size}
        if others and not saved.changed:
            where = f"the position in the data in the checkpoint of step {saved.step}"
            why = f"is of batches of {others.pop()} sequences, and not of {size}: the batch has changed"
            raise UserError.one(where, why, _FIX)
        group.load_positions(positions)

    def reached(self, dataset: int, shard: int) -> tuple[int, DocumentPlace | None]:
        """See :class:`~titan_core.api.data.replay.DataReplay`."""
        epoch, current = self._followed[dataset].newest[shard]
        return epoch, place_of(current)


class _Followed:
    """A source that remembers the newest epoch of each logical shard."""

    def __init__(self, source: DocumentSource) -> None:
        self._source = source
        self.newest: dict[int, tuple[int, DocumentShard]] = {}

    @property
    def num_documents(self) -> int | None:
        """See :class:`~titan_core.api.DocumentSource`."""
        return self._source.num_documents

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """See :class:`~titan_core.api.DocumentSource`."""
        made = self._source.shard(index, count, epoch)
        self.newest[index] = epoch, made
        return made
