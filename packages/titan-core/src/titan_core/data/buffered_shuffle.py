"""Shuffling of streams: documents are read in blocks of fixed size, and each block is returned in random order.

The order is a function of (seed, shard, epoch, block), so a position consists of the position where the block begins and the
number of documents returned from it. The buffered documents are not saved; they are read again after a restore.
"""

from __future__ import annotations

import numpy

from titan_core.api import CorruptRecord, Document, DocumentShard, DocumentSource, ExcludedRecord
from titan_core.api.data.dataset import DocumentPlace, State
from titan_core.toolkit.reading import place_of
from titan_core.toolkit.stream_check import digest_of, position_of, require_document


class BufferedShuffle:
    """A :class:`~titan_core.api.DocumentShard` that shuffles another."""

    def __init__(self, shard: DocumentShard, size: int, key: tuple[int, ...], traced: bool = False) -> None:
        """
        Args:
            size: documents per block.
            key: seeds the order, together with the block's number.
            traced: whether to keep the places of a block's documents, for :meth:`place`.
        """
        self._places: list[DocumentPlace | None] | None = [] if traced else None
        self._shard, self._size, self._key = shard, size, key
        self._block = 0
        self._begin = shard.state_dict()
        self._documents: list[Document | CorruptRecord | ExcludedRecord] | None = None
        self._returned = 0
        self.block_digest = 0
        """Digest of the documents of the block that was read last, in the order in which they are returned. It shows after a
        restore that the block is the same: those that were returned already and those that were not."""

    def __iter__(self) -> BufferedShuffle:
        return self

    def __next__(self) -> Document:
        if self._at_end():
            self._begin, self._documents, self._returned = position_of(self._shard), None, 0
            self._block += 1
        if self._documents is None:
            self._documents = self._read_block()
        if self._returned >= len(self._documents):
            raise StopIteration
        document = self._documents[self._returned]
        self._returned += 1
        if isinstance(document, CorruptRecord | ExcludedRecord):
            raise document
        return document

    def _at_end(self) -> bool:
        """Return whether all documents of the block have been returned."""
        return self._documents is not None and self._returned == len(self._documents) > 0

    def _read_block(self) -> list[Document | CorruptRecord | ExcludedRecord]:
        block: list[Document | CorruptRecord | ExcludedRecord] = []
        places: list[DocumentPlace | None] = []
        while len(block) < self._size:
            try:
                document: Document | CorruptRecord | ExcludedRecord = require_document(next(self._shard))
            except StopIteration:
                break
            except (CorruptRecord, ExcludedRecord) as error:
                document = error  # raised in its turn
            block.append(document)
            if self._places is not None:
                places.append(place_of(self._shard))
        order = numpy.random.default_rng([*self._key, self._block]).permutation(len(block))
        shuffled = [block[index] for index in order]
        digests = [0 if isinstance(one, CorruptRecord | ExcludedRecord) else digest_of(one) for one in shuffled]
        self.block_digest = digest_of(f"{digests}")
        if self._places is not None:
            self._places = [places[index] for index in order]
        return shuffled

    def place(self) -> DocumentPlace | None:
        """See :class:`~titan_core.api.DocumentShard`."""
        return self._places[self._returned - 1] if self._places and self._returned else None

    def state_dict(self) -> State:
        """See :class:`~titan_core.api.DocumentShard`."""
        if self._at_end():
            return {"block": self._block + 1, "begin": position_of(self._shard), "given": 0}
        return {"block": self._block, "begin": self._begin, "given": self._returned}

    def load_state_dict(self, state: State) -> None:
        """See :class:`~titan_core.api.DocumentShard`. Reads nothing, because reading may fail."""
        self._block, self._begin = int(state["block"]), state["begin"]
        self._shard.load_state_dict(self._begin)
        self._documents, self._returned = None, int(state["given"])


class ShuffledStream:
    """A shuffled stream of documents."""

    num_documents = None

    def __init__(self, source: DocumentSource, size: int, seed: int, traced: bool = False) -> None:
        """``traced``: see :class:`BufferedShuffle`."""
        self._source, self._size, self._seed, self._traced = source, size, seed, traced

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """Return the source's shard, shuffled."""
        shard = self._source.shard(index, count, epoch)
        return BufferedShuffle(shard, self._size, (self._seed, index, count, epoch), self._traced)
