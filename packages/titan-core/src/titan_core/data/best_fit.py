"""Packing that cuts fewer documents (``data.packing = "best_fit"``). Free of torch.

Best-fit decreasing, within a window of documents: documents that are longer than a sequence are cut into whole sequences and
a rest; then each piece, from the longest to the shortest, goes to the sequence with the least room that suffices, or begins
another.

Source: Ding et al., Fewer Truncations Improve Language Modeling, arXiv 2404.10830, section 3, which packs a whole corpus.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy
from numpy.typing import NDArray

from titan_core.api.data.dataset import State
from titan_core.api.data.replay import ReadDocument, UsedTokens
from titan_core.data.tokens import TokenStream
from titan_core.data.window import Window
from titan_core.toolkit.stream_check import digest_of

Piece = tuple[int, int, int]
"""A document's number in its block, and the range of its tokens."""


@dataclass(frozen=True)
class PackedDocument:
    """A document of a block."""

    ids: NDArray[Any]
    weights: NDArray[Any] | None
    extras: Mapping[str, NDArray[Any]]
    parts: tuple[int, ...]
    whole: bool
    digest: int
    read: ReadDocument | None
    """What it is, if the stream is traced."""


@dataclass
class PackedBlock:
    """Successive documents of a logical shard, which are packed together."""

    epoch: int
    begin: State = field(default_factory=dict)
    """The last records up to its first document (:attr:`~titan_core.toolkit.stream_check.StreamCheck.position`)."""
    records: int = 0
    """Digest of these records."""
    documents: list[PackedDocument] = field(default_factory=list)
    tokens: int = 0
    sequences: list[list[Piece]] = field(default_factory=list)
    """Filled when all documents are read."""
    length: int = 0
    """Length of these sequences."""
    earlier: list[list[int]] = field(default_factory=list)
    """Lengths of earlier sequences of the block, each with their number."""
    digest: int = 0
    """Digest of its documents and those before it."""


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Return the numbers of the pieces in each sequence, in no particular order.

    Args:
        sizes: of the pieces, at most ``room`` each.
        room: size of a sequence.
    """
    sequences: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room and number of each sequence that is not full, in order of room
    for number in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        at = bisect_left(free, (sizes[number], -1))
        if at < len(free):
            left, sequence = free.pop(at)
            sequences[sequence].append(number)
        else:
            left, sequence = room, len(sequences)
            sequences.append([number])
        if left > sizes[number]:
            insort(free, (left - sizes[number], sequence))
    return sequences


class BestFitStream(TokenStream):
    """A stream of sequences that are packed by best fit.

    The documents are read in blocks of ``window`` (of fewer long ones: a block is full when it could fill as many
    sequences). Each block is packed by itself, and while its sequences are returned the next one is read, a share for each
    sequence.

    The state is that of the first document of the block, with the number of its sequences that were returned and their
    length, and a digest of the block. The block is read and packed again after a restore. Where the length changes within a
    block, what is left of it is packed anew.
    """

    def __init__(self, *arguments: Any, window: int, key: tuple[int, ...]) -> None:
        """
        Args:
            arguments: those of :class:`~titan_core.data.tokens.TokenStream`.
            window: number of documents in a block.
            key: seeds the order of a block's sequences.
        """
        self._window, self._key = window, key
        self._block: PackedBlock | None = None
        self._restored: State | None = None  # until it is checked
        self._given, self._ended = 0, False
        super().__init__(*arguments)
        self._next = PackedBlock(self._epoch)

    @property
    def epoch(self) -> int:
        """Number of times that the shard was read to its end before the current block."""
        return self._next.epoch if self._block is None else self._block.epoch

    def take(self, length: int) -> Window | None:
        """Return the next sequence, of at most ``length`` tokens; ``None`` at the end of the shard, unless it is
        repeated."""
        while self._block is None or self._given == len(self._block.sequences):
            if not self._begin_block(length):
                return None
        window = self._window_of(self._block, self._given)
        self._given += 1
        self._read_up_to(ceil(self._window * self._given / len(self._block.sequences)), length)
        self._position = self._position_now()
        return window

    def load_state_dict(self, state: State) -> None:
        """See :class:`~titan_core.data.tokens.TokenStream`."""
        self._restore(state)
        self._block, self._given, self._ended = None, 0, False
        self._next = PackedBlock(state["epoch"])
        self._restored = state if state["length"] is not None else None

    def _begin_block(self, length: int) -> bool:
        """Make the next block the current one; return ``False`` if there is none.

        Raises:
            UserError: another block is there than when the position was saved.
        """
        restored, self._restored = self._restored, None
        block = self._next
        used = 0 if restored is None else int(restored["used"])
        if restored is not None:
            block.earlier = list(restored["earlier"] or [])
            if restored["length"] != length:
                block.earlier.append([int(restored["length"]), used])
        self._read_up_to(self._window, length)
        block.sequences, block.length = self._packed(block, length), length
        block.digest = digest_of(f"{block.records} {[document.digest for document in block.documents]}")
        if block.documents:
            self._block, self._given = block, 0
            self._next = PackedBlock(self._epoch)
        if restored is not None:
            if restored["digest"] not in (None, _digest_of(block, used, restored["earlier"])):
                raise self._shard_name.mismatch(restored)
            anew = len(block.earlier) > len(restored["earlier"] or [])  # packed for another length, and not used yet
            self._given = 0 if anew else min(used, len(block.sequences))
        return bool(block.documents)

    def _read_up_to(self, documents: int, length: int) -> None:
        """Read the next block until it has ``documents``, or is full."""
        block = self._next
        full = self._window * (block.earlier[0][0] if block.earlier else length)
        while len(block.documents) < documents and block.tokens < full and not self._ended:
            self._ended = not self._read_document()
            if self._ended or not len(self._document):  # a new epoch has begun
                continue
            if self._whole:
                self._require_to_fit(length)
            if not block.documents:
                block.epoch, block.begin, block.records = self._epoch, self._begin, self._records
            tokens, weights, digest = self._document, self._weights, self._digest()
            block.documents.append(
                PackedDocument(tokens, weights, self._extras, self._parts, self._whole, digest, self._read)
            )
            block.tokens += len(tokens)
            self._used = len(tokens)

    def _packed(self, block: PackedBlock, length: int) -> list[list[Piece]]:
        """Return the sequences of ``block`` that are left after its earlier ones, for sequences of ``length``."""
        documents = block.documents
        pieces = [(number, 0, len(document.ids)) for number, document in enumerate(documents)]
        for earlier, used in block.earlier:
            left = self._sequences(pieces, earlier)[used:]
            pieces = _merged(sorted(piece for sequence in left for piece in sequence))
        self.documents += len(documents)
        self.cut += sum(not document.whole and len(document.ids) > length for document in documents)
        return self._sequences(pieces, length)

    def _sequences(self, pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
        """Return sequences of ``length`` with ``pieces``, cut where they are longer."""
        pieces = [
            (number, start, min(start + length, end)) for number, begin, end in pieces for start in range(begin, end, length)
        ]
        if self._alone:
            packed = [[number] for number in range(len(pieces))]
        else:
            packed = best_fit([end - start for _, start, end in pieces], length)
        sequences = [sorted(pieces[number] for number in numbers) for numbers in packed]
        # As packed, sequences of long documents come first.
        order = numpy.random.default_rng([*self._key, len(sequences)]).permutation(len(sequences))
        return [sequences[number] for number in order]

    def _window_of(self, block: PackedBlock, sequence: int) -> Window:
        window = Window([])
        for number, start, end in block.sequences[sequence]:
            document = block.documents[number]
            for size in document.parts or (end - start,):
                used = slice(start, start + size)
                window.pieces.append(document.ids[used])
                window.weights.append(None if document.weights is None else document.weights[used])
                extras = {name: one[used] if self._fields[name].sequence else one for name, one in document.extras.items()}
                window.extras.append(extras)
                if document.read is not None:
                    window.used.append(UsedTokens(document.read, start, size))
                start += size
        return window

    def _position_now(self) -> State:
        block = self._block
        if block is None:
            nothing = {"used": 0, "digest": None, "length": None, "earlier": None}
            return {"epoch": self._epoch, **self._begin, **nothing}
        earlier = block.earlier or None
        used = {"used": self._given, "digest": _digest_of(block, self._given, earlier)}
        return {"epoch": block.epoch, **block.begin, **used, "length": block.length, "earlier": earlier}


def _digest_of(block: PackedBlock, used: int, earlier: Sequence[Sequence[int]] | None) -> str:
    return f"{digest_of(f'{block.digest} {used} {earlier}'):08x}"


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Return ``pieces``, which are sorted, with those that continue each other as one."""
    merged: list[Piece] = []
    for number, start, end in pieces:
        if merged and merged[-1][0] == number and merged[-1][2] == start:
            start = merged.pop()[1]
        merged.append((number, start, end))
    return merged
