"""Logical shards: what they read next, and where they are. Free of torch, so that a worker process starts in a blink."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from titan_core.api.dataset import DocumentSource, State, StepRows, StreamSpec
from titan_core.api.tokenizer import TextTokenizer
from titan_core.api.tools.reading import DocumentReader
from titan_core.data.buffered_shuffle import ShuffledStream
from titan_core.data.mixture import Mixture
from titan_core.data.tokens import TokenStream, Window


class LogicalShard:
    """One logical shard: a stream of each dataset, and which one is next."""

    def __init__(
        self,
        spec: StreamSpec,
        sources: Sequence[DocumentSource],
        tokenizer: TextTokenizer,
        readers: Sequence[DocumentReader],
        index: int,
    ) -> None:
        plan = spec.plan
        self._mixture = Mixture([one.weight for one in spec.datasets], spec.seed)
        self._index, self._per_step = index, plan.global_size // plan.logical_shards
        self._global_size, self._length = plan.global_size, plan.seq_len + 1
        self._streams = [
            TokenStream(source, tokenizer, index, plan.logical_shards, spec.on_end, one.name, reader)
            for one, source, reader in zip(spec.datasets, sources, readers, strict=True)
        ]
        self._taken = 0

    @property
    def epoch(self) -> int:
        """How many times every dataset was read to its end."""
        return min(stream.epoch for stream in self._streams)

    def take(self) -> tuple[Window, int] | None:
        """The next window, and its dataset."""
        step, place = divmod(self._taken, self._per_step)
        # A logical shard fills the same places of every global batch, on whatever rank.
        sequence = step * self._global_size + self._index * self._per_step + place
        dataset = self._mixture.dataset_of(sequence)
        window = self._streams[dataset].take(self._length)
        if window is None:
            return None
        self._taken += 1
        return window, dataset

    def state_dict(self) -> State:
        """The position after the last window."""
        return {"taken": self._taken, "streams": [stream.state_dict() for stream in self._streams]}

    def load_state_dict(self, state: State) -> None:
        """Go on from a position that :meth:`state_dict` gave."""
        self._taken = int(state["taken"])
        for stream, position in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(position)


class ShardGroup:
    """The logical shards that one process reads, step by step."""

    def __init__(
        self, spec: StreamSpec, sources: Sequence[DocumentSource], tokenizer: TextTokenizer, indices: Iterable[int]
    ) -> None:
        plan = spec.plan
        self._once = spec.on_end == "once"
        self._per_step, self._length = plan.global_size // plan.logical_shards, plan.seq_len + 1
        self._readers = [DocumentReader(spec.policy, one.name) for one in spec.datasets]
        shuffled = _shuffled(spec, sources)
        self._shards = {index: LogicalShard(spec, shuffled, tokenizer, self._readers, index) for index in indices}

    def read(self) -> StepRows | None:
        """The next step's rows, or ``None`` where a logical shard has ended and is not to be repeated."""
        taken: list[tuple[Window, int]] = []
        for shard in self._shards.values():
            for _ in range(self._per_step):
                one = shard.take()
                if one is None:
                    if not self._once:
                        return None
                    one = Window([]), 0
                taken.append(one)
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
        )

    def stop(self) -> None:
        """Wait for nothing that is to be tried again; from another thread."""
        for reader in self._readers:
            reader.stopped.set()

    def positions(self) -> dict[str, State]:
        """Each logical shard's position, after what was read."""
        return {str(index): shard.state_dict() for index, shard in self._shards.items()}

    def go_to(self, positions: dict[str, State]) -> None:
        """Go on from positions that :meth:`positions` gave, here or elsewhere."""
        for index, shard in self._shards.items():
            shard.load_state_dict(positions[str(index)])


def _weights(windows: Sequence[Window], shape: tuple[int, ...]) -> NDArray[Any] | None:
    if all(one is None for window in windows for one in window.weights):
        return None
    weights = numpy.ones(shape, numpy.float32)
    for row, window in zip(weights, windows, strict=True):
        first = 0
        for piece, of_piece in zip(window.pieces, window.weights, strict=True):
            if of_piece is not None:
                row[first : first + len(piece)] = of_piece
            first += len(piece)
    return weights


def _shuffled(spec: StreamSpec, sources: Sequence[DocumentSource]) -> list[DocumentSource]:
    """Streams read through a buffer, where one is wanted; the others have an order of their own in each epoch already."""
    if not spec.shuffle_buffer:
        return list(sources)
    size, seed = spec.shuffle_buffer, spec.seed
    return [ShuffledStream(one, size, seed) if one.num_documents is None else one for one in sources]
