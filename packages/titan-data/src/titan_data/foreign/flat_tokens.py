"""Dataset ``flat_tokens``: files that are one row of token ids, in which a token ends each document.

Where the documents are is not known without reading all of them. The files are therefore divided into pieces of equal size,
and each piece has the documents that begin in it: their ends are searched for when the piece is read. What is read and held
when a dataset is opened does not depend on its size. Pieces are shuffled; documents of a piece follow one another. In a
small dataset, each document is a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import DatasetContext, Document, DocumentPlace, DocumentShard, ShuffledDocuments, UserError
from titan_core.toolkit.reading import State
from titan_data.foreign.config import FlatTokensSection
from titan_data.foreign.documents import TOKEN, Format, TokenFile, found_files
from titan_data.foreign.flat_files import ENDINGS, FlatFile, describe_files, read_header
from titan_data.mapped_files import MappedFiles
from titan_data.places import parse_place

PIECE: Final = 1 << 14
"""Maximum number of tokens between the begins of two pieces."""
SMALLEST: Final = 1 << 6
"""The same for small files, which are divided into some :data:`PIECES`."""
PIECES: Final = 1 << 10
NO_END: Final = -1
INDEXED: Final = 1 << 24
"""Maximum number of tokens of a dataset whose ends are all searched for when it is opened: each document is then a piece."""
_SEARCHED = 1 << 22
_FIRST, _BLOCK = 1 << 10, 1 << 16
"""Number of tokens that are searched for an end at first, and at most, at a time."""


@dataclass(frozen=True)
class FlatPieces(TokenFile):
    """A file in pieces, which have the place of documents."""

    header: FlatFile
    end_token_id: int
    size: int
    """Number of tokens between the begins of two pieces, before they are moved to those of documents."""
    begins: NDArray[Any] | None
    """First token of each piece, if all have been searched for."""
    mark = TOKEN
    may_contain = True

    def ranges(self, maps: MappedFiles, first: int, last: int) -> list[tuple[int, int]]:
        """See :class:`~titan_data.foreign.documents.TokenFile`. Pieces that have not been searched for begin some tokens
        later."""
        if self.begins is None:
            begin, end = first * self.size, min(last * self.size, self.header.tokens)
        else:
            begin, end = self._begin(None, first), self._begin(None, last)
        item = numpy.dtype(self.dtype).itemsize
        return [(self.header.skip + begin * item, self.header.skip + end * item)]

    def read(self, maps: MappedFiles, document: int) -> tuple[NDArray[Any], str]:
        """Return the tokens of the documents that begin in a piece, and its place."""
        tokens = maps.array(self.path, self.header.dtype, self.header.skip)
        begin, end = self._begin(tokens, document), self._begin(tokens, document + 1)
        return tokens[begin:end], f"{self.path}, tokens {begin} to {end}"

    def number_of(self, maps: MappedFiles, document: int) -> int:
        """Return the first token of a piece."""
        return self._begin(maps.array(self.path, self.header.dtype, self.header.skip), document)

    def _begin(self, tokens: NDArray[Any] | None, piece: int) -> int:
        """Return where the first document of ``piece`` begins."""
        if self.begins is not None:
            return int(self.begins[piece]) if piece < len(self.begins) else self.header.tokens
        at = piece * self.size
        if piece == 0 or at >= self.header.tokens or self.end_token_id == NO_END:
            return min(at, self.header.tokens)
        assert tokens is not None
        found = _first_end(tokens, self.end_token_id, at - 1)  # an end right before the piece
        return len(tokens) if found is None else found + 1


def _first_end(tokens: NDArray[Any], end_token_id: int, at: int, most: int | None = None) -> int | None:
    """Return the place of the first end token from ``at`` on, and below ``most``."""
    most = len(tokens) if most is None else min(most, len(tokens))
    step = _FIRST
    while at < most:
        found = numpy.flatnonzero(tokens[at : min(at + step, most)] == end_token_id)
        if len(found):
            return at + int(found[0])
        at, step = at + step, min(2 * step, _BLOCK)
    return None


def _describe(files: Sequence[FlatPieces]) -> list[str]:
    headers, end = [file.header for file in files], files[0].end_token_id
    kinds = ", ".join(sorted({numpy.dtype(header.dtype).name for header in headers}))
    ended = "no token ends a document" if end == NO_END else f"token {end} ends a document"
    return [f"{describe_files(headers)}: {sum(header.tokens for header in headers):,} tokens, as {kinds}; {ended}"]


class FlatDocuments:
    """The documents of shuffled pieces."""

    num_documents = None

    def __init__(self, context: DatasetContext[FlatTokensSection], shuffled: ShuffledDocuments) -> None:
        assert context.section.end_token_id is not None
        self._end_token_id, self._shuffled = context.section.end_token_id, shuffled

    @property
    def fingerprint(self) -> dict[str, Any] | None:
        """See :class:`~titan_core.api.DocumentSource`."""
        return self._shuffled.fingerprint

    @property
    def order(self) -> str:
        """See :class:`~titan_core.api.DocumentSource`."""
        return f"pieces of {PIECE} tokens, {self._shuffled.order}"

    def shard(self, index: int, count: int, epoch: int) -> DocumentShard:
        """See :class:`~titan_core.api.DocumentSource`."""
        return _Documents(self._shuffled.shard(index, count, epoch), self._end_token_id)

    def find(self, place: str, count: int) -> DocumentPlace | None:
        """Return the place of the document that begins at ``place``, with the number of the piece that contains it. Pieces
        are not searched: whether a document begins there is known when the piece is read."""
        piece = self._shuffled.find(place, count)
        if piece is None or piece.index is None or (written := parse_place(place)) is None:
            return None
        file, mark, _ = piece.text.rpartition(TOKEN)
        return DocumentPlace(f"{file}{mark}{written.number}", piece.index)

    def position(self, index: int, count: int, epoch: int) -> tuple[int, int]:
        """See :meth:`~titan_core.api.ShuffledDocuments.position`: of pieces."""
        return self._shuffled.position(index, count, epoch)

    def requests(self, index: int, count: int, epoch: int) -> Iterator[tuple[int, list[tuple[Path, int, int]]]]:
        """See :meth:`~titan_core.api.ShuffledDocuments.requests`: of pieces."""
        return self._shuffled.requests(index, count, epoch)


class _Documents:
    """The documents of a shard's pieces. The state is the position of the current piece, and how many of its documents have
    been returned."""

    def __init__(self, shard: DocumentShard, end_token_id: int) -> None:
        self._shard, self._end_token_id = shard, end_token_id
        self._piece = shard.state_dict()
        self._documents: list[NDArray[Any]] = []
        self._given, self._skipped = 0, 0

    def __iter__(self) -> _Documents:
        return self

    def __next__(self) -> Document:
        while self._given == len(self._documents):
            before = self._shard.state_dict()
            piece = next(self._shard)
            assert isinstance(piece, numpy.ndarray)
            self._piece, self._documents = before, _documents(piece, self._end_token_id)
            self._given, self._skipped = min(self._skipped, len(self._documents)), 0
        self._given += 1
        return self._documents[self._given - 1]

    def place(self) -> DocumentPlace | None:
        """See :class:`~titan_core.api.DocumentShard`."""
        inner: Any = self._shard
        piece: DocumentPlace | None = inner.place()
        if piece is None or not self._given:
            return piece
        file, mark, begin = piece.text.rpartition(TOKEN)
        before = sum(len(document) for document in self._documents[: self._given - 1])
        return replace(piece, text=f"{file}{mark}{int(begin) + before}")

    def state_dict(self) -> State:
        return {"piece": self._piece, "given": self._given or self._skipped}

    def load_state_dict(self, state: State) -> None:
        self._shard.load_state_dict(state["piece"])
        self._piece, self._documents = state["piece"], []
        self._given, self._skipped = 0, int(state["given"])


def _documents(tokens: NDArray[Any], end_token_id: int) -> list[NDArray[Any]]:
    """Return the documents in a piece, each with the token that ends it."""
    if end_token_id == NO_END or not len(tokens):
        return [tokens] if len(tokens) else []
    ends = numpy.flatnonzero(tokens == end_token_id) + 1
    return [part for part in numpy.split(tokens, ends) if len(part)]


def _find(context: DatasetContext[FlatTokensSection], path: Path) -> list[FlatPieces]:
    """Return the pieces of the files that ``path`` (a file, a glob, or a folder) names."""
    section = context.section
    found = found_files(context, path, ENDINGS, "name a file, a glob, or a folder")
    for file in found:
        if file.with_suffix(".idx").is_file():
            fix = 'set training.dataset = "megatron", and the path to the two files without their endings'
            raise UserError.one(str(file), "has an index of Megatron-LM beside it", fix)
    if section.end_token_id is None:
        why = "the files do not record which token ends a document"
        fix = "set flat_tokens.end_token_id to its id (50256 for GPT-2's tokenizer), or to -1 if there is none"
        raise UserError.one(context.where, why, fix)
    headers = [header for file in found if (header := read_header(file, section.dtype, "flat_tokens.dtype")).tokens]
    maps, end = MappedFiles(), section.end_token_id
    if headers and end != NO_END:
        tokens = maps.array(headers[0].path, headers[0].dtype, headers[0].skip)
        if _first_end(tokens, end, 0, _SEARCHED) is None:
            why = f"no document ends in its first {min(len(tokens), _SEARCHED):,} tokens: none of them is {end}"
            fix = "correct flat_tokens.end_token_id, or set it to -1 if no token ends a document"
            raise UserError.one(str(headers[0].path), why, fix)
    total = sum(header.tokens for header in headers)
    size = min(max(total // PIECES, SMALLEST), PIECE)
    pieces = []
    for header in headers:
        begins = _begins(maps, header, end) if total <= INDEXED and end != NO_END else None
        number = -(-header.tokens // size) if begins is None else len(begins)
        pieces.append(FlatPieces(header.path, number, header.tokens, header.dtype, header, end, size, begins))
    return pieces


def _begins(maps: MappedFiles, file: FlatFile, end_token_id: int) -> NDArray[Any]:
    """Return where each document of ``file`` begins."""
    tokens = maps.array(file.path, file.dtype, file.skip)
    found = numpy.concatenate([[0], numpy.flatnonzero(tokens[:] == end_token_id) + 1])
    return found[found < len(tokens)]


FORMAT: Final = Format("the path to its files", _find, _describe, FlatDocuments)
