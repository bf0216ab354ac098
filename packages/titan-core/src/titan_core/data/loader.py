"""The data loader: this rank's share of each global batch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from titan_core.api import Batch, DocumentSource, RefusedChange, TextTokenizer
from titan_core.api.checkpoint.store import refused_changes
from titan_core.api.config.sections import DataSection
from titan_core.api.data.dataset import State, StreamSpec
from titan_core.api.data.replay import StepRows
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.api.training.batch import IGNORE
from titan_core.data.batches import batch_of
from titan_core.data.positions import checked_positions
from titan_core.data.prefetch import Prefetch
from titan_core.data.shards import ShardGroup
from titan_core.data.streams import MIXTURE, AcceptedChange, changed_documents, stream_changes, stream_identity

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepData:
    """One rank's data for one optimizer step."""

    microbatches: list[Batch]
    epoch: int
    """Number of times that the dataset was read to its end."""
    targets_by_dataset: list[int]
    """Number of target tokens in this rank's share, by dataset."""
    target_weight: float
    """Total weight of the targets in this rank's share."""
    corrupt: int = 0
    """Number of corrupt records that this rank has skipped so far."""
    empty: int = 0
    """Number of empty documents that this rank has skipped so far."""
    ended: bool = False
    """Whether this rank has no data left. Only for datasets that are read once; other ranks may still have data."""


class DataLoader:
    """Cuts the logical shards that a rank owns into microbatches.

    Each logical shard fills the same rows of every global batch, and a rank owns whole shards. The tokens of a step thus do
    not depend on the number of ranks.
    """

    def __init__(
        self,
        spec: StreamSpec,
        sources: Sequence[DocumentSource],
        tokenizer: TextTokenizer,
        rank: int,
        *,
        document_mask: bool = False,
        document_ends: bool = False,
        workers: int = 0,
        ahead: int = 2,
        pin: bool = False,
    ) -> None:
        """
        Args:
            sources: the datasets of ``spec``, opened.
            rank: number of this rank's data-parallel group, from 0 to ``spec.plan.ranks - 1``.
            document_mask: whether positions and attention restart with each document.
            document_ends: whether variable-length attention computes documents, which needs their ends.
            workers: number of reader processes; 0 reads in a thread.
            ahead: number of steps to read ahead.
            pin: whether batches are in pinned memory, from which copies to a GPU do not block. A step's is pinned at once,
                not microbatch by microbatch; torch does not reuse it before the copies are done.
        """
        owned = spec.plan.logical_shards // spec.plan.ranks
        self._spec, self._sources, self._tokenizer = spec, sources, tokenizer
        self._indices = range(rank * owned, (rank + 1) * owned)
        self._document_mask, self._document_ends = document_mask, document_mask and document_ends
        self._workers, self._ahead, self._pin = workers, ahead, pin
        self._prefetch: Prefetch | None = None
        self._positions: dict[str, State] | None = None
        self._peeked: list[tuple[StepData, dict[str, State]] | None] = []
        self._untrainable: set[int] = set()  # datasets that this was logged for

    def peek(self) -> StepData | None:
        """Return the next step's data, or ``None`` if a logical shard has ended and is not repeated. The positions do not
        advance until :meth:`next_step` consumes the data."""
        if not self._peeked:
            if self._prefetch is None:
                self._prefetch = Prefetch(
                    self._spec, self._sources, self._tokenizer, self._indices, self._workers, self._ahead, self._positions
                )
            parts = self._prefetch.next()
            self._peeked.append(self._step_of(parts) if parts is not None else None)
        step = self._peeked[0]
        return step[0] if step is not None else None

    def next_step(self) -> StepData | None:
        """Return and consume the next step's data, or ``None`` like :meth:`peek`."""
        self.peek()
        step = self._peeked[0]
        if step is None:
            return None
        self._peeked.clear()
        data, self._positions = step
        return data

    def state_dict(self) -> State:
        """Return the position of each of this rank's logical shards after the last consumed step, and the identity of the
        stream that the positions belong to."""
        if self._positions is None:
            self._positions = ShardGroup(self._spec, self._sources, self._tokenizer, self._indices).positions()
        return {"stream_of": self._stream, "shards": self._positions}

    def refused_changes(self, state: State, allowed: Sequence[str] = ()) -> list[RefusedChange]:
        """Return the differences between this stream and that of ``state``, returned by :meth:`state_dict`.

        Args:
            allowed: patterns of accepted differences (:func:`~titan_core.data.streams.stream_changes`).
        """
        refused, _ = stream_changes(self._spec, state["stream_of"], self._stream, allowed)
        return refused

    def load_state_dict(self, state: State, allowed: Sequence[str] = ()) -> None:
        """Resume from positions that :meth:`state_dict` returned on any ranks; ``state`` may include shards of others.

        Args:
            allowed: patterns of accepted differences (:func:`~titan_core.data.streams.stream_changes`).

        Raises:
            UserError: the positions belong to another stream.
            ValueError: a position is missing or malformed.
        """
        refused, accepted = stream_changes(self._spec, state["stream_of"], self._stream, allowed)
        if refused:
            raise refused_changes(refused, allowed)
        for change in accepted:
            chosen = change.aspect in (MIXTURE, "weight", "excluded")  # rather than found in the data
            log.log(logging.INFO if chosen else logging.WARNING, "changed since the checkpoint: %s", change.text)
        self.close()
        # Check now, rather than fail in the thread or process that reads.
        first = ShardGroup(self._spec, self._sources, self._tokenizer, self._indices).positions()
        positions = checked_positions(state, first, self._stream)
        self._positions = {index: self._accepting(position, accepted, allowed) for index, position in positions.items()}

    def _accepting(self, position: State, accepted: Sequence[AcceptedChange], allowed: Sequence[str]) -> State:
        """Return ``position`` without the digests of datasets whose documents may have changed."""
        changed = changed_documents(self._spec, accepted, allowed)
        streams = [{**one, "digest": None} if number in changed else one for number, one in enumerate(position["streams"])]
        return {**position, "streams": streams}

    @cached_property
    def _stream(self) -> State:
        """Identity of the stream that positions belong to. Cached, because computing it reads the data."""
        return stream_identity(self._spec, self._sources, self._tokenizer)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._prefetch is not None:
            self._prefetch.close()
        self._prefetch = None
        self._peeked.clear()

    def _step_of(self, parts: list[StepRows]) -> tuple[StepData, dict[str, State]]:
        per_shard = self._spec.plan.global_size // self._spec.plan.logical_shards
        first = self._indices.start * per_shard
        whole = batch_of(self._spec, parts, self._document_mask, first, self._document_ends)
        if self._pin:
            whole = whole.map(torch.Tensor.pin_memory)
        targets: Counter[int] = Counter()
        datasets = (dataset for part in parts for dataset in part.datasets)
        pieces = (row for part in parts for row in part.lengths)
        for dataset, row, count in zip(datasets, pieces, (whole.targets != IGNORE).sum(1).tolist(), strict=True):
            targets[dataset] += count
            if sum(row) > 1 and not count and dataset not in self._untrainable:
                self._untrainable.add(dataset)
                # An error, because ranks other than the first, which read other documents, log only errors.
                log.error(
                    "dataset %r: a sequence has no token to train on: each of its documents has one token and "
                    "data.document_mask separates them, or the weights of all its tokens are 0",
                    self._spec.datasets[dataset].name,
                )
        size = self._spec.plan.local_size
        data = StepData(
            whole.split(size),
            epoch=min(part.epoch for part in parts),
            target_weight=float(whole.target_weights().sum(dtype=torch.float64)),
            targets_by_dataset=[targets[number] for number in range(len(self._spec.datasets))],
            corrupt=sum(part.corrupt for part in parts),
            empty=sum(part.empty for part in parts),
            ended=all(part.ended for part in parts),
        )
        return data, {index: position for part in parts for index, position in part.positions.items()}


def data_loader(job: AssembledJob, sources: Sequence[DocumentSource], rank: int, pin: bool = False) -> DataLoader:
    """Return the loader of the job's training data for data-parallel group ``rank``."""
    section = job.config.section(DataSection)
    return DataLoader(
        job.data,
        sources,
        job.text_tokenizer,
        rank,
        document_mask=section.document_mask,
        document_ends=section.document_attention == "varlen",
        workers=section.num_workers,
        ahead=section.prefetch,
        pin=pin,
    )
