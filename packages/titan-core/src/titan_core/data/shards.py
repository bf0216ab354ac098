"""Logical shards: their next sequences and their positions. Free of torch, so that worker processes start quickly."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy
from numpy.typing import NDArray

from titan_core.api import DocumentSource, TextTokenizer
from titan_core.api.data.dataset import DatasetSpec, State, StreamSpec
from titan_core.api.data.replay import StepRows
from titan_core.data.best_fit import BestFitStream
from titan_core.data.buffered_shuffle import ShuffledStream
from titan_core.data.extras import rows_of
from titan_core.data.tokens import TokenStream
from titan_core.data.window import Window
from titan_core.toolkit.reading import DocumentReader


class LogicalShard:
    """One logical shard: a stream per dataset, and the choice of the next one."""

    def __init__(
        self,
        spec: StreamSpec,
        sources: Sequence[DocumentSource],
        tokenizer: TextTokenizer,
        readers: Sequence[DocumentReader],
        index: int,
        traced: bool = False,
    ) -> None:
        plan = spec.plan
        self._mixture = Mixture([dataset.weight for dataset in spec.datasets], spec.seed)
        self._index, self._shards, self._global_size = index, plan.logical_shards, plan.global_size
        self._per_step = plan.global_size // plan.logical_shards
        self._length = plan.seq_len + 1
        self._streams = [
            _stream(spec, source, tokenizer, index, dataset, reader, traced)
            for dataset, source, reader in zip(spec.datasets, sources, readers, strict=True)
        ]
        self._first = self._taken = 0
        self._idle: dict[str, State] = {}

    @property
    def epoch(self) -> int:
        """Number of times that every dataset was read to its end."""
        return min(stream.epoch for stream in self._streams)

    @property
    def documents(self) -> int:
        """Number of documents in the windows so far."""
        return sum(stream.documents for stream in self._streams)

    @property
    def cut(self) -> int:
        """Number of documents of which no window has all tokens."""
        return sum(stream.cut for stream in self._streams)

    def take(self) -> tuple[Window, int] | None:
        """Return the next window and the number of its dataset, or ``None`` at the end of the data."""
        step, row = divmod(self._taken, self._per_step)
        # A logical shard fills the same rows of every global batch, on any rank.
        sequence = self._first + step * self._global_size + self._index * self._per_step + row
        dataset = self._mixture.dataset_of(sequence)
        window = self._streams[dataset].take(self._length)
        if window is None:
            return None
        self._taken += 1
        return window, dataset

    def state_dict(self) -> State:
        """Return the position after the last window: ``taken``, the number of windows since the global batch has its
        ``global_size``; ``first``, the number of sequences of the run before that; the position in each dataset; and
        ``idle``, those in datasets that the mixture had earlier."""
        streams = [stream.state_dict() for stream in self._streams]
        sizes = {"first": self._first, "global_size": self._global_size}
        return {"taken": self._taken, **sizes, "streams": streams, "idle": self._idle}

    def load_state_dict(self, state: State) -> None:
        """Resume from a position that :meth:`state_dict` returned, perhaps with another global batch."""
        self._first, self._taken, size = int(state["first"]), int(state["taken"]), int(state["global_size"])
        if size != self._global_size:
            self._first, self._taken = self._first + self._taken * self._shards, 0
        self._idle = state["idle"]
        for stream, position in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(position)


class ShardGroup:
    """The logical shards that one process reads, step by step."""

    def __init__(
        self,
        spec: StreamSpec,
        sources: Sequence[DocumentSource],
        tokenizer: TextTokenizer,
        indices: Iterable[int],
        traced: bool = False,
    ) -> None:
        """``traced``: whether to note which documents the rows consist of (:attr:`~StepRows.used`)."""
        plan = spec.plan
        self._traced = traced
        self._once, self._extras = spec.on_end == "once", spec.extras
        self._per_step, self._length = plan.global_size // plan.logical_shards, plan.seq_len + 1
        self._readers = [DocumentReader(spec.policy, dataset.name) for dataset in spec.datasets]
        shuffled = _shuffled(spec, sources, traced)
        self._shards = {index: LogicalShard(spec, shuffled, tokenizer, self._readers, index, traced) for index in indices}

    def read(self) -> StepRows | None:
        """Return the next step's rows, or ``None`` if a logical shard has ended and is not repeated."""
        taken: list[tuple[Window, int]] = []
        for shard in self._shards.values():
            for _ in range(self._per_step):
                sequence = shard.take()
                if sequence is None:
                    if not self._once:
                        return None
                    sequence = Window([]), 0
                taken.append(sequence)
        rows = numpy.zeros((len(taken), self._length), numpy.uint32)
        for row, (window, _) in zip(rows, taken, strict=True):
            if window.pieces:
                numpy.concatenate(window.pieces, out=row[: len(window)], casting="unsafe")
        return StepRows(
            tokens=rows,
            weights=_weights([window for window, _ in taken], rows.shape),
            lengths=[[len(piece) for piece in window.pieces] for window, _ in taken],
            datasets=[dataset for _, dataset in taken],
            positions=self.positions(),
            epoch=min((shard.epoch for shard in self._shards.values()), default=0),
            corrupt=sum(reader.corrupt for reader in self._readers),
            empty=sum(reader.empty for reader in self._readers),
            ended=not any(window.pieces for window, _ in taken),
            documents=sum(shard.documents for shard in self._shards.values()),
            cut=sum(shard.cut for shard in self._shards.values()),
            extras={
                name: rows_of(extra, name, [window for window, _ in taken], self._length)
                for name, extra in self._extras.items()
            },
            used=[window.used for window, _ in taken] if self._traced else [],
        )

    def stop(self) -> None:
        """Abort waits before retries. Called from another thread."""
        for reader in self._readers:
            reader.stopped.set()

    def positions(self) -> dict[str, State]:
        """Return the position of each logical shard after the last read."""
        return {str(index): shard.state_dict() for index, shard in self._shards.items()}

    def load_positions(self, positions: dict[str, State]) -> None:
        """Resume from positions that :meth:`positions` returned, in any process."""
        for index, shard in self._shards.items():
            shard.load_state_dict(positions[str(index)])


def _stream(
    spec: StreamSpec,
    source: DocumentSource,
    tokenizer: TextTokenizer,
    index: int,
    dataset: DatasetSpec,
    reader: DocumentReader,
    traced: bool,
) -> TokenStream:
    """Return the sequences of logical shard ``index`` of a dataset."""
    count, origins = spec.plan.logical_shards, (dataset.build.origin, spec.tokenizer.origin)
    excluded = spec.excluded.get(dataset.name, frozenset[int]())
    arguments = (
        source,
        tokenizer,
        index,
        count,
        spec.on_end,
        dataset.name,
        reader,
        origins,
        dataset.extras,
        traced,
        excluded,
    )
    if not spec.packing_window:
        return TokenStream(*arguments)
    return BestFitStream(*arguments, window=spec.packing_window, key=(spec.seed, index, count))


def _weights(windows: Sequence[Window], shape: tuple[int, ...]) -> NDArray[Any] | None:
    if all(weights is None for window in windows for weights in window.weights):
        return None
    weights = numpy.ones(shape, numpy.float32)
    for row, window in zip(weights, windows, strict=True):
        first = 0
        for piece, of_piece in zip(window.pieces, window.weights, strict=True):
            if of_piece is not None:
                row[first : first + len(piece)] = of_piece
            first += len(piece)
    return weights


def _shuffled(spec: StreamSpec, sources: Sequence[DocumentSource], traced: bool) -> list[DocumentSource]:
    """Return ``sources`` with streams shuffled through a buffer, if configured. Other sources already shuffle each epoch."""
    size, seed = spec.shuffle_buffer, spec.seed
    return [
        ShuffledStream(source, size, seed, traced) if size and source.num_documents is None else source for source in sources
    ]


_BITS = 64
_GOLDEN = 0x9E3779B97F4A7C15
"""``2 ** 64`` divided by the golden ratio. Its multiples are spread evenly over a circle (a Weyl sequence)."""


class Mixture:
    """Datasets by weight. In any range of successive sequences the share of a dataset equals its weight, up to a few
    sequences. Nothing is drawn at random, so short runs and single batches are well mixed too."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """``weights`` need not sum to 1."""
        total = sum(weights)
        self._bounds = [int(upto / total * 2**_BITS) for upto in accumulate(weights)][:-1]
        digest = hashlib.sha256(f"mixture:{seed}".encode()).digest()
        self._offset = int.from_bytes(digest[:8], "little")

    def dataset_of(self, sequence: int) -> int:
        """Return the number of the dataset for sequence ``sequence`` of the run, counted over all ranks."""
        point = (sequence * _GOLDEN + self._offset) % 2**_BITS
        return bisect_right(self._bounds, point)
