"""Dataset ``flat_tokens``: files that are one row of token ids, in which a token ends each document.

Where the documents are is not known without reading all of them. The files are therefore divided into pieces of equal size,
and each piece has the documents that begin in it: their ends are searched for when the piece is read. What is read and held
when a dataset is opened does not depend on its size. Pieces are shuffled; documents of a piece follow one another. In a
small dataset, each document is a piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import DatasetContext, Document, DocumentShard, DocumentSource, Problem, ShuffledDocuments, UserError
from titan_core.toolkit.reading import State
from titan_data.foreign.config import FlatTokensSection
from titan_data.foreign.documents import (
    UNRECORDED,
    CheckedDocuments,
    MappedFiles,
    check_documents,
    needed_path,
)
from titan_data.foreign.flat_files import ENDINGS, FlatFile, describe_files, read_header
from titan_data.storage import files_below, kind_of, matching

PIECE: Final = 1 << 14
"""Maximum number of tokens between the begins of two pieces."""
SMALLEST: Final = 1 << 6
"""The same for small files, which are divided into some :data:`PIECES`."""
PIECES: Final = 1 << 10
NO_END: Final = -1
INDEXED: Final = 1 << 24
"""Maximum number of tokens of a dataset whose ends are all searched for when it is opened: each document is then a piece."""
_SEARCHED = 1 << 22
_BLOCK = 1 << 16


class FlatPieces:
    """Pieces of some files."""

    def __init__(self, files: Sequence[FlatFile], end_token_id: int) -> None:
        self._files = [file for file in files if file.tokens]
        self.end_token_id = end_token_id
        tokens = sum(file.tokens for file in self._files)
        self._size = min(max(tokens // PIECES, SMALLEST), PIECE)
        self._maps = MappedFiles()
        self._begins = (
            [self._begins_in(file) for file in self._files] if tokens <= INDEXED and end_token_id != NO_END else None
        )
        counts = (
            (len(one) for one in self._begins) if self._begins else (-(-one.tokens // self._size) for one in self._files)
        )
        self._upto = list(accumulate(counts))

    @property
    def files(self) -> Sequence[Path]:
        """See :class:`~titan_data.foreign.documents.Layout`."""
        return [file.path for file in self._files]

    def __len__(self) -> int:
        return self._upto[-1] if self._upto else 0

    def read(self, index: int) -> tuple[NDArray[Any], str]:
        """Return the tokens of the documents that begin in piece ``index``, and its place."""
        number = bisect_right(self._upto, index)
        file = self._files[number]
        piece = index - (self._upto[number - 1] if number else 0)
        tokens = self._maps.array(file.path, file.dtype, file.skip)
        if self._begins is None:
            begin, end = self._cut(tokens, piece), self._cut(tokens, piece + 1)
        else:
            begins = self._begins[number]
            begin = int(begins[piece])
            end = int(begins[piece + 1]) if piece + 1 < len(begins) else len(tokens)
        return tokens[begin:end], f"{file.path}, tokens {begin} to {end}"

    def _begins_in(self, file: FlatFile) -> NDArray[Any]:
        """Return where each document of ``file`` begins."""
        tokens = self._maps.array(file.path, file.dtype, file.skip)
        found = numpy.concatenate([[0], numpy.flatnonzero(tokens[:] == self.end_token_id) + 1])
        return found[found < len(tokens)]

    def _cut(self, tokens: NDArray[Any], piece: int) -> int:
        """Return where the first document of ``piece`` begins."""
        at = piece * self._size
        if piece == 0 or at >= len(tokens) or self.end_token_id == NO_END:
            return min(at, len(tokens))
        found = self.first_end(tokens, at - 1)  # an end right before the piece
        return len(tokens) if found is None else found + 1

    def first_end(self, tokens: NDArray[Any], at: int, most: int | None = None) -> int | None:
        """Return the place of the first end token from ``at`` on, and below ``most``."""
        most = len(tokens) if most is None else min(most, len(tokens))
        while at < most:
            found = numpy.flatnonzero(tokens[at : min(at + _BLOCK, most)] == self.end_token_id)
            if len(found):
                return at + int(found[0])
            at += _BLOCK
        return None

    def documents(self, tokens: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the documents in a piece, each with the token that ends it."""
        if self.end_token_id == NO_END or not len(tokens):
            return [tokens] if len(tokens) else []
        ends = numpy.flatnonzero(tokens == self.end_token_id) + 1
        return [part for part in numpy.split(tokens, ends) if len(part)]

    def check_end(self, key: str) -> None:
        """
        Args:
            key: config key of the end token.

        Raises:
            UserError: the first tokens contain no end token.
        """
        if self.end_token_id == NO_END or not self._files:
            return
        file = self._files[0]
        tokens = self._maps.array(file.path, file.dtype, file.skip)
        if self.first_end(tokens, 0, _SEARCHED) is None:
            why = (
                f"no document ends in its first {min(len(tokens), _SEARCHED):,} tokens: none of them is {self.end_token_id}"
            )
            raise UserError.one(str(file.path), why, f"correct {key}, or set it to -1 if no token ends a document")

    def describe(self) -> list[str]:
        """See :class:`~titan_data.foreign.documents.Layout`."""
        kinds = ", ".join(sorted({numpy.dtype(file.dtype).name for file in self._files}))
        tokens = sum(file.tokens for file in self._files)
        ended = "no token ends a document" if self.end_token_id == NO_END else f"token {self.end_token_id} ends a document"
        return [f"{describe_files(self._files)}: {tokens:,} tokens, as {kinds}; {ended}", UNRECORDED]


class FlatDocuments:
    """The documents of shuffled pieces."""

    num_documents = None

    def __init__(self, pieces: FlatPieces, context: DatasetContext[FlatTokensSection]) -> None:
        checked = CheckedDocuments(pieces, context.vocab_size)
        self._pieces, self._shuffled = pieces, ShuffledDocuments(checked, context.seed, pieces.files, context.shuffle)

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
        return _Documents(self._shuffled.shard(index, count, epoch), self._pieces)


class _Documents:
    """The documents of a shard's pieces. The state is the position of the current piece, and how many of its documents have
    been returned."""

    def __init__(self, shard: DocumentShard, pieces: FlatPieces) -> None:
        self._shard, self._pieces = shard, pieces
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
            self._piece, self._documents = before, self._pieces.documents(piece)
            self._given, self._skipped = min(self._skipped, len(self._documents)), 0
        self._given += 1
        return self._documents[self._given - 1]

    def state_dict(self) -> State:
        return {"piece": self._piece, "given": self._given or self._skipped}

    def load_state_dict(self, state: State) -> None:
        self._shard.load_state_dict(state["piece"])
        self._piece, self._documents = state["piece"], []
        self._given, self._skipped = 0, int(state["given"])


def open_flat_tokens(context: DatasetContext[FlatTokensSection]) -> DocumentSource:
    """Open the files at ``training.dataset_path``.

    Raises:
        UserError: they are missing, damaged or empty, or it is unclear how to read them.
    """
    pieces = layout(context)
    if not len(pieces):
        raise UserError.one(context.where, "the files contain no tokens", "check the path")
    return FlatDocuments(pieces, context)


def check_flat_tokens(context: DatasetContext[FlatTokensSection]) -> list[Problem]:
    """Check the headers, the ids of some pieces, and that the first documents end."""
    return check_documents(context, layout)


def describe_flat_tokens(context: DatasetContext[FlatTokensSection]) -> list[str]:
    """Return the number of tokens, and how the files are read."""
    return layout(context).describe()


def layout(context: DatasetContext[FlatTokensSection]) -> FlatPieces:
    """Return the pieces of the files at the dataset's path: a file, a glob, or a folder.

    Raises:
        UserError: there is no such file, one is damaged, or it is unclear how to read them.
    """
    section, path = context.section, needed_path(context, "the path to its files")
    kind = kind_of(path)
    if kind == "folder":
        found = [file for file in files_below(path) if file.suffix in ENDINGS]
        why = f"the folder contains no file that ends in {' or '.join(ENDINGS)}"
    else:
        found = [path] if kind == "file" else matching(path)
        why = "no such file"
    if not found:
        raise UserError.one(context.where, why, "name a file, a glob, or a folder", missing=kind is None)
    for file in found:
        if file.with_suffix(".idx").is_file():
            fix = 'set training.dataset = "megatron", and the path to the two files without their endings'
            raise UserError.one(str(file), "has an index of Megatron-LM beside it", fix)
    if section.end_token_id is None:
        why = "the files do not record which token ends a document"
        fix = "set flat_tokens.end_token_id to its id (50256 for GPT-2's tokenizer), or to -1 if there is none"
        raise UserError.one(context.where, why, fix)
    pieces = FlatPieces(
        [read_header(file, section.dtype, "flat_tokens.dtype") for file in sorted(found)], section.end_token_id
    )
    pieces.check_end("flat_tokens.end_token_id")
    return pieces
