"""Token ids in files of other tools: the one reader of :data:`titan_data.foreign.formats.FORMATS`, and its checks of the
ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import (
    CorruptRecord,
    DatasetContext,
    Document,
    DocumentSource,
    ShuffledDocuments,
    UserError,
    WeightedTokens,
)
from titan_core.api.data.tokenizer import token_ids
from titan_data.file_documents import FileDocuments
from titan_data.limits import DEFAULT, too_large
from titan_data.mapped_files import MappedFiles, detached
from titan_data.storage import files_below, kind_of, matching, nothing_at, require_unicode

_SAMPLED, _SAMPLE = 16, 1 << 12
"""Number of documents, and of tokens in each, whose ids are checked when a dataset is opened."""
TOKEN: Final = ", token "
UNRECORDED: Final = "the files do not record their tokenizer: the text below shows whether it is the recipe's"
TOKENIZER_FIX: Final = "set model.tokenizer and model.tokenizer_path to the tokenizer that made the data"


@dataclass(frozen=True)
class TokenFile(ABC):
    """A file of token ids, with the files that belong to it, whose sizes have been checked."""

    path: Path
    documents: int
    tokens: int | None
    """Number of tokens; ``None``: only reading all documents would tell."""
    dtype: str | None
    """Type of the ids; ``None``: each document names its own."""
    mark: ClassVar[str] = FileDocuments.mark
    may_contain: ClassVar[bool] = FileDocuments.may_contain
    """These two: see :class:`~titan_data.file_documents.FileDocuments`."""

    @property
    def files(self) -> Sequence[Path]:
        """All of its files."""
        return [self.path]

    @property
    def packed(self) -> Path | None:
        """The compressed file of which ``path`` is the copy to be made, if it is one."""
        return None

    @property
    def shown(self) -> Path:
        """Its name in messages: that of the original if ``path`` is a copy."""
        return self.packed or self.path

    def number_of(self, maps: MappedFiles, document: int) -> int:
        """Return the number of a document in messages."""
        return document

    @abstractmethod
    def ranges(self, maps: MappedFiles, first: int, last: int) -> list[tuple[int, int]]:
        """Return the ranges of bytes that contain documents ``first`` to ``last`` (exclusive), which exist.

        Raises:
            UserError: the index of the format is damaged there.
        """

    def extents(self, maps: MappedFiles, first: int, last: int) -> list[tuple[Path, int, int]]:
        """Return :meth:`ranges`, and those of the other files that are read with them."""
        return [(self.path, begin, end) for begin, end in self.ranges(maps, first, last)]

    def read(self, maps: MappedFiles, document: int) -> tuple[NDArray[Any] | WeightedTokens, str]:
        """Return a document and its place, for error messages.

        Raises:
            UserError: the index of the format is damaged there.
        """
        assert self.dtype is not None
        ids, item = maps.array(self.path, self.dtype), numpy.dtype(self.dtype).itemsize
        parts = [ids[begin // item : end // item] for begin, end in self.ranges(maps, document, document + 1)]
        place = f"{self.path}, document {document}"
        return parts[0] if len(parts) == 1 else numpy.concatenate([numpy.empty(0, self.dtype), *parts]), place


class TokenDocuments(FileDocuments):
    """The documents of some files; each id is checked against the vocabulary when it is read."""

    def __init__(self, found: Sequence[TokenFile], vocab_size: int | None, limit: int = DEFAULT) -> None:
        """
        Args:
            vocab_size: exclusive upper limit of token ids; ``None``: there is no tokenizer to compare with.
            limit: bytes of a document.
        """
        self._limit = limit
        self.token_files = [file for file in found if file.documents]
        self._vocab_size = vocab_size
        for file in self.token_files[:1]:  # all have one format
            self.mark, self.may_contain = file.mark, file.may_contain
        super().__init__([*accumulate(file.documents for file in self.token_files)])

    @property
    def files(self) -> list[Path]:
        """All files, in order."""
        return [path for file in self.token_files for path in file.files]

    def text(self, index: int) -> Document:
        """Return document ``index``.

        Raises:
            CorruptRecord: it is too large, or an id is outside the vocabulary.
            UserError: the index of the format is damaged there.
        """
        document = self._read(index)
        if isinstance(document, WeightedTokens):
            return replace(document, ids=detached(document.ids))
        return detached(document)

    def name_of(self, file: int) -> Path:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        return self.token_files[file].shown

    def number_of(self, file: int, document: int) -> int:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        return self.token_files[file].number_of(self._maps, document)

    def ranges(self, number: int, first: int, last: int) -> list[tuple[Path, int, int]]:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        return self.token_files[number].extents(self._maps, first, last)

    def check_sample(self) -> None:
        """Check the ids of some documents between the first and the last.

        Raises:
            CorruptRecord: an id is outside the vocabulary.
            UserError: the index of the format is damaged.
        """
        if self._vocab_size is not None and len(self):
            for index in sorted({number * (len(self) - 1) // (_SAMPLED - 1) for number in range(_SAMPLED)}):
                self._read(index, _SAMPLE)

    def _read(self, index: int, checked: int | None = None) -> NDArray[Any] | WeightedTokens:
        """``checked``: number of ids that are checked; ``None``: all."""
        number, place_in_file = self.locate(index)
        size = sum(
            end - begin for begin, end in self.token_files[number].ranges(self._maps, place_in_file, place_in_file + 1)
        )
        if size > self._limit:
            raise too_large(self.place(index), size, self._limit, "the document")
        document, place = self.token_files[number].read(self._maps, place_in_file)
        ids = document.ids if isinstance(document, WeightedTokens) else document
        if self._vocab_size is not None:
            try:
                token_ids(ids[:checked], self._vocab_size)
            except ValueError as error:
                raise CorruptRecord(place, str(error), TOKENIZER_FIX) from None
        return document


def describe_amount(files: Sequence[TokenFile]) -> list[str]:
    """Return how much there is, in which types."""
    amount = f"{sum(file.documents for file in files):,} documents"
    if None not in (tokens := [file.tokens for file in files]):
        amount += f", {sum(filter(None, tokens)):,} tokens"
    kinds = " and ".join(sorted({numpy.dtype(file.dtype).name for file in files if file.dtype is not None}))
    return [f"{amount}, as {kinds}" if kinds else amount]


@dataclass(frozen=True)
class Format:
    """How the datasets of a format are found and read."""

    needs: str
    """What ``training.dataset_path`` names, for errors."""
    find: Callable[[DatasetContext[Any], Path], Sequence[TokenFile]]
    """Returns the files at the dataset's path; raises :class:`~titan_core.api.UserError`: there is none, or one is damaged,
    or is not understood."""
    describe: Callable[[Sequence[Any]], list[str]] = describe_amount
    """Returns how much there is in some files, and further lines that say how they are read."""
    divide: Callable[[DatasetContext[Any], ShuffledDocuments], DocumentSource] | None = None
    """Returns the documents in those of the files, if these have several each."""


def shown(first: int, last: int) -> str:
    """Return the names of documents ``first`` to ``last`` (exclusive), for errors."""
    return f"document {first}" if last == first + 1 else f"one of the documents {first} to {last - 1}"


def found_files(context: DatasetContext[Any], path: Path, endings: Sequence[str], fix: str) -> list[Path]:
    """Return the files that ``path`` names, sorted: a file, the matches of a glob, or those of a folder that end in one
    of ``endings``.

    Raises:
        UserError: there is none.
    """
    kind = kind_of(path)
    if kind == "folder":
        found = [file for file in files_below(path) if file.suffix in endings]
        why = f"the folder contains no file that ends in {' or '.join(endings)}"
    else:
        found, why = [path] if kind == "file" else matching(path), f"{path}: {nothing_at(path)}"
    if not found:
        raise UserError.one(context.where, why, fix, missing=kind is None)
    require_unicode(found)
    return sorted(found)
