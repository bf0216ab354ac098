"""Tokenised datasets on disk, memory-mapped. :mod:`titan_data.tokenize` writes them.

A folder contains ``tokenized.json`` and parts of two files each: ``part-00000.bin`` has the token ids of all documents in a
row (uint16 if the vocabulary allows, else uint32), and ``part-00000.idx`` the number of tokens up to the end of each
document (int64). All numbers are little-endian.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from titan_core.api import CorruptRecord, DatasetContext, DocumentSource, Problem, ShuffledDocuments, UserError
from titan_core.api.data.tokenizer import token_ids
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.files import LONGEST_TABLE, open_file, read_bytes
from titan_core.toolkit.plain_json import plain_json
from titan_data.file_documents import FileDocuments
from titan_data.limits import DEFAULT, too_large
from titan_data.mapped_files import detached
from titan_data.storage import is_remote, located, reading, unreadable

FORMAT = 1
INDEX = "tokenized.json"
ENDS = numpy.dtype("<i8")
DTYPES = ("<u2", "<u4")
_REPAIR = "copy the whole folder again, or tokenise the dataset again"


@dataclass(frozen=True)
class Part:
    """One part of the dataset: a pair of files."""

    name: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class TokenizedIndex:
    """The contents of ``tokenized.json``."""

    dtype: str
    tokenizer: str
    """Component name of the tokenizer."""
    fingerprint: str
    parts: tuple[Part, ...]

    def write(self, folder: Path) -> None:
        """Write the index. This must come last: it marks the dataset as complete."""
        with atomic_write(folder / INDEX) as part:
            part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")


def token_dtype(vocab_size: int) -> str:
    """Return the smallest type that can store every token id."""
    return DTYPES[0] if vocab_size <= 2**16 else DTYPES[1]


def read_index(folder: Path) -> TokenizedIndex:
    """Read the folder's index and check the size of every file against it.

    Raises:
        UserError: the index is missing, damaged, of another format version, or does not match the files.
    """
    where = str(folder)
    try:
        contents = plain_json(read_bytes(folder / INDEX, longest=LONGEST_TABLE))
        found = contents.pop("format")
        if found != FORMAT:
            why = f"has format version {found!r}, but this titan-data reads version {FORMAT}"
            raise UserError.one(where, why, "tokenise the dataset again")
        index = TokenizedIndex(**{**contents, "parts": tuple(Part(**part) for part in contents["parts"])})
        _check_index(index)
    except OSError as error:
        if is_remote(folder) and not isinstance(error, FileNotFoundError):
            raise
        why = f"not a complete tokenised dataset: {INDEX}: {error.strerror or error}"
        fix = "run `titan data tokenize` to make or resume it"
        raise UserError.one(where, why, fix, missing=not folder.exists()) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError.one(f"{folder / INDEX}", f"damaged: {error}", "tokenise the dataset again") from None
    size_of = numpy.dtype(index.dtype).itemsize
    for part in index.parts:
        for ending, expected in ((".bin", part.tokens * size_of), (".idx", part.documents * ENDS.itemsize)):
            file = folder / (part.name + ending)
            size = file.stat().st_size if file.is_file() else None
            if size != expected:
                actual = "is missing" if size is None else f"has {size:,} bytes"
                raise UserError.one(
                    str(file), f"{actual}, but {INDEX} says {expected:,} bytes: the index does not match the data", _REPAIR
                )
    return index


def _check_index(index: TokenizedIndex) -> None:
    """Check the type and range of each field.

    Raises:
        ValueError: :meth:`TokenizedIndex.write` cannot have written a field.
    """
    if index.dtype not in DTYPES:
        raise ValueError(f"dtype is {index.dtype!r}, not one of {', '.join(DTYPES)}")
    if not isinstance(index.tokenizer, str) or not isinstance(index.fingerprint, str):
        raise ValueError("tokenizer and fingerprint must be strings")
    for part in index.parts:
        if not isinstance(part.name, str) or Path(part.name).name != part.name:
            raise ValueError(f"the name of a part is {part.name!r}, which is not a file name")
        for count in (part.documents, part.tokens):
            if type(count) is not int or count < 0:
                raise ValueError(f"{part.name} has {count!r} documents or tokens")


class MappedTokens(FileDocuments):
    """Tokenised documents, fetched by index without reading any others."""

    def __init__(self, folder: Path, index: TokenizedIndex, vocab_size: int | None = None, limit: int = DEFAULT) -> None:
        """
        Args:
            vocab_size: the exclusive upper limit of token ids, checked for each document when it is read.
            limit: bytes of a document.

        Raises:
            UserError: the index of a part does not match its data.
        """
        self._vocab_size, self._limit = vocab_size, limit
        parts = [part for part in index.parts if part.documents]
        self._files = [(folder / f"{part.name}.bin", folder / f"{part.name}.idx") for part in parts]
        self._dtype = index.dtype
        super().__init__([*accumulate(part.documents for part in parts)])
        for (_, file), part in zip(self._files, parts, strict=True):
            first, last = _first_and_last(file)
            if last != part.tokens or first < 0:
                why = f"the last document ends at token {last:,}, but the data has {part.tokens:,} tokens"
                raise UserError.one(str(file), f"{why}: the index does not match the data", _REPAIR)

    def text(self, index: int) -> NDArray[Any]:
        """Return the token ids of document ``index``, including its begin and end tokens.

        Raises:
            CorruptRecord: the document is too large, or contains an id outside the vocabulary.
            UserError: the entry of the document in the index is damaged.
        """
        number, place = self.locate(index)
        data, file = self._files[number]
        tokens, ends = self._maps.array(data, self._dtype), self._maps.index(file, ENDS.str)
        begin, end = (int(ends[place - 1]) if place else 0), int(ends[place])
        if not 0 <= begin <= end <= len(tokens):
            raise UserError.one(
                str(file),
                f"document {place} begins at token {begin:,} and ends at {end:,} of {len(tokens):,}: the index is damaged",
                _REPAIR,
            )
        if (size := (end - begin) * numpy.dtype(self._dtype).itemsize) > self._limit:
            raise too_large(self.place(index), size, self._limit, "the document")
        document = tokens[begin:end]
        if self._vocab_size is not None:
            try:
                token_ids(document, self._vocab_size)
            except ValueError as error:
                raise CorruptRecord(self.place(index), f"{error}: the file is damaged", _REPAIR) from None
        return detached(document)

    def name_of(self, file: int) -> Path:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        return self._files[file][0]

    def ranges(self, number: int, first: int, last: int) -> list[tuple[Path, int, int]]:
        """See :class:`~titan_data.file_documents.FileDocuments`."""
        data, file = self._files[number]
        ends, item = self._maps.index(file, ENDS.str), numpy.dtype(self._dtype).itemsize
        begin = int(ends[first - 1]) if first else 0
        return [(data, begin * item, int(ends[last - 1]) * item)]


def open_tokenized(context: DatasetContext[None]) -> DocumentSource:
    """Open the tokenised dataset at ``training.dataset_path``.

    Raises:
        UserError: the dataset is missing, damaged or empty, or was made with another tokenizer.
    """
    problems = check_tokenized(context)
    if problems:
        raise UserError(*problems)
    folder = located(context.path or "", context.where)
    index = read_index(folder)
    files = [folder / (part.name + ending) for part in index.parts for ending in (".bin", ".idx")]
    return ShuffledDocuments(
        MappedTokens(folder, index, context.vocab_size, context.max_record_bytes), context.seed, files, context.shuffle
    )


def check_tokenized(context: DatasetContext[None]) -> list[Problem]:
    """Check that the dataset is complete, and was made with the job's tokenizer."""
    if not context.path:
        return [Problem(context.where, "dataset 'tokenized' needs the path to its folder", "set training.dataset_path")]
    try:
        with reading(context.path):
            index = read_index(located(context.path, context.where))
    except UserError as error:
        return list(error.problems)
    except OSError as error:
        return [unreadable(context, error)]
    if not any(part.documents for part in index.parts):
        return [Problem(context.where, "the dataset is empty", "tokenise a dataset that contains documents")]
    if context.tokenizer and context.tokenizer != index.fingerprint:
        why = f"tokenised by {index.tokenizer!r} with other token ids than this job's tokenizer produces"
        fix = "set model.tokenizer and model.tokenizer_path to that tokenizer, or tokenise the dataset again"
        return [Problem(context.where, why, fix)]
    return []


def _first_and_last(file: Path) -> tuple[int, int]:
    """Return the first and the last end of a document in an index."""
    with open_file(file) as stream:
        first = stream.read(ENDS.itemsize)
        stream.seek(-ENDS.itemsize, os.SEEK_END)
        return int(numpy.frombuffer(first, ENDS)[0]), int(numpy.frombuffer(stream.read(), ENDS)[0])
