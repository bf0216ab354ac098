"""Orders in which a logical shard reads documents that can be fetched by index (``data.shuffle``). All are computed: from
positions in the shard to documents, for some of them at a time."""

from __future__ import annotations

from typing import Any, Final

import numpy
from numpy import int64
from numpy.typing import NDArray

from titan_core.api.data.dataset import Shuffle
from titan_core.api.data.permutation import Permutation

VERSIONS: Final = {"documents": 2, "blocks": 1, "none": 1}
"""Versions of the orders. Version 1 of ``documents``, which had no name, stored a permutation that numpy drew."""
BLOCK_BYTES: Final = 4 << 20
"""Size of a block, if there are enough of them."""
WINDOW: Final = 16
"""Number of blocks whose documents are shuffled with each other."""
UNPACKED_BLOCK: Final = 16 << 20
"""Size of a block of documents that are unpacked in memory, each of which is a window of its own."""
_LEAST: Final = 64
"""Least number of blocks of each shard, unless it has fewer documents: shards differ by two blocks at most."""
NO_DOCUMENT: Final = -1
_TYPICAL: Final = 4096
"""Bytes of a document, where its files are not known."""


class Every:
    """Every ``count``-th document of an order of all documents."""

    def __init__(self, positions: range, order: Permutation | None) -> None:
        """
        Args:
            positions: of the shard's documents in the order of all.
            order: of all documents; ``None``: as they are.
        """
        self._positions, self._order = positions, order

    def __len__(self) -> int:
        return len(self._positions)

    def documents_at(self, first: int, last: int) -> NDArray[int64]:
        """Return the documents at positions ``first`` to ``last`` (exclusive)."""
        positions = _array(self._positions[first:last])
        return positions if self._order is None else self._order(positions)

    def shard_of(self, document: int) -> int:
        """Return the number of the shard, of all of them, that reads a document."""
        return self._place_of(document) % self._positions.step

    def position_of(self, document: int) -> int:
        """Return the position of one of the shard's documents: the inverse of :meth:`documents_at`."""
        return self._place_of(document) // self._positions.step

    def _place_of(self, document: int) -> int:
        return document if self._order is None else int(self._order.inverse(numpy.array([document]))[0])


class Blocks:
    """Blocks of successive documents in random order, of which a shard reads every ``count``-th; the documents of
    ``together`` blocks that follow each other in the shard are shuffled with each other."""

    def __init__(self, size: int, block: int, index: int, count: int, key: tuple[int, ...], together: int = WINDOW) -> None:
        """
        Args:
            size: number of all documents.
            block: number of documents in a block; the last one of the dataset may have fewer.
        """
        self._size, self._block, self._index, self._key = size, block, index, key
        number = -(-size // block)
        self._order = Permutation(number, key) if number else None
        self._mine = range(index, number, count)
        self._together, self._window = together, together * block

    def __len__(self) -> int:
        return len(self._mine) * self._block

    def documents_at(self, first: int, last: int) -> NDArray[int64]:
        """Return the documents at positions ``first`` to ``last`` (exclusive); :data:`NO_DOCUMENT` where there is none."""
        parts = [numpy.empty(0, int64)]
        while first < last:
            window = first // self._window
            begin, upto = window * self._window, min(last, (window + 1) * self._window)
            blocks = self._blocks_of(window)
            shuffled = self._shuffled(window, len(blocks))
            places = shuffled(numpy.arange(first - begin, upto - begin))
            parts.append(blocks[places // self._block] * self._block + places % self._block)
            first = upto
        documents = numpy.concatenate(parts)
        documents[documents >= self._size] = NO_DOCUMENT  # of the last block
        return documents

    def shard_of(self, document: int) -> int:
        """Return the number of the shard, of all of them, that reads a document."""
        return self._place_of(document // self._block) % self._mine.step

    def position_of(self, document: int) -> int:
        """Return the position of one of the shard's documents: the inverse of :meth:`documents_at`."""
        block, within = divmod(document, self._block)
        window, number = divmod(self._place_of(block) // self._mine.step, self._together)
        shuffled = self._shuffled(window, len(self._blocks_of(window)))
        return window * self._window + int(shuffled.inverse(numpy.array([number * self._block + within]))[0])

    def _place_of(self, block: int) -> int:
        assert self._order is not None
        return int(self._order.inverse(numpy.array([block]))[0])

    def _shuffled(self, window: int, blocks: int) -> Permutation:
        """Return the order of the documents of a window of ``blocks`` blocks."""
        return Permutation(blocks * self._block, (*self._key, self._index, window))

    def window_of(self, position: int) -> int:
        """Return the number of the window that contains a position."""
        return position // self._window

    def ranges_of(self, window: int) -> list[tuple[int, int]]:
        """Return the first and last (exclusive) document of each block of a window; none behind the last window."""
        firsts = [block * self._block for block in self._blocks_of(window).tolist()]
        return [(first, min(first + self._block, self._size)) for first in firsts]

    def _blocks_of(self, window: int) -> NDArray[int64]:
        mine = self._mine[window * self._together : (window + 1) * self._together]
        return self._order(_array(mine)) if self._order is not None else _array(mine)


def order_of(
    shuffle: Shuffle,
    size: int,
    num_bytes: int | None,
    index: int,
    count: int,
    key: tuple[int, ...],
    *,
    unpacked: bool = False,
) -> Every | Blocks:
    """Return the order of shard ``index`` of ``count``.

    Args:
        size: number of all documents.
        num_bytes: size of all documents; ``None`` if it is not known.
        key: seed and number of the epoch.
        unpacked: whether ``num_bytes`` are not those of files but of memory, of which each shard holds a window.
    """
    if shuffle == "blocks":
        of_block = UNPACKED_BLOCK if unpacked else BLOCK_BYTES
        of_size = of_block * size // num_bytes if num_bytes else of_block // _TYPICAL
        block = max(1, min(of_size, size // (_LEAST * count)))
        return Blocks(size, block, index, count, key, 1 if unpacked else WINDOW)
    order = Permutation(size, key) if size and shuffle == "documents" else None
    return Every(range(index, size, count), order)


def _array(numbers: range) -> NDArray[Any]:
    return numpy.arange(numbers.start, numbers.stop, numbers.step, dtype=int64)
