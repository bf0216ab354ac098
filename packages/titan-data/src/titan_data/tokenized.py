"""Tokenised datasets on disk, memory-mapped (made by :mod:`titan_data.tokenize`).

A folder holds ``tokenized.json`` and parts, each of two files: ``part-00000.bin``, token ids one after another (uint16 where
the vocabulary allows, else uint32), and ``part-00000.idx``, the number of tokens up to the end of each document (int64). All
numbers are little-endian.
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from titan_core.api.dataset import CorruptRecord, DatasetContext, DocumentSource
from titan_core.api.errors import Problem, UserError
from titan_core.api.tokenizer import token_ids
from titan_core.api.tools.shuffled import ShuffledDocuments

FORMAT = 1
INDEX = "tokenized.json"
ENDS = numpy.dtype("<i8")
DTYPES = ("<u2", "<u4")


@dataclass(frozen=True)
class Part:
    """A pair of files."""

    name: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class TokenizedIndex:
    """What a folder holds."""

    dtype: str
    tokenizer: str
    """What the tokenizer was called."""
    fingerprint: str
    parts: tuple[Part, ...]

    def write(self, folder: Path) -> None:
        """Make the folder whole: this comes last."""
        partial = folder / f"{INDEX}.partial"
        partial.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        partial.replace(folder / INDEX)


def token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every id."""
    return DTYPES[0] if vocab_size <= 2**16 else DTYPES[1]


def read_index(folder: Path) -> TokenizedIndex:
    """The folder's index, with every file's size held against it.

    Raises:
        UserError: it is not there, not one of ours, or does not match the files.
    """
    where = str(folder)
    try:
        contents = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        found = contents.pop("format")
        if found != FORMAT:
            raise UserError.one(where, f"its format is {found!r}, and this titan-core reads {FORMAT}", "tokenize it again")
        index = TokenizedIndex(**{**contents, "parts": tuple(Part(**part) for part in contents["parts"])})
        _check_index(index)
    except OSError as error:
        fix = "make it with `titan data tokenize`, which resumes one that was interrupted"
        raise UserError.one(where, f"no tokenised dataset: {INDEX}: {error.strerror or error}", fix) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError.one(f"{folder / INDEX}", f"damaged: {error}", "tokenize it again") from None
    size_of = numpy.dtype(index.dtype).itemsize
    for part in index.parts:
        for ending, expected in ((".bin", part.tokens * size_of), (".idx", part.documents * ENDS.itemsize)):
            file = folder / (part.name + ending)
            size = file.stat().st_size if file.is_file() else None
            if size != expected:
                is_so = "is missing" if size is None else f"has {size:,} bytes"
                raise UserError.one(
                    str(file),
                    f"it {is_so}, and {INDEX} says {expected:,}: the index does not match its data",
                    "copy the whole folder again, or tokenize it again",
                )
    return index


def _check_index(index: TokenizedIndex) -> None:
    """Each field's type and range.

    Raises:
        ValueError: of one that is none of :meth:`TokenizedIndex.write`.
    """
    if index.dtype not in DTYPES:
        raise ValueError(f"dtype is {index.dtype!r}, not one of {', '.join(DTYPES)}")
    if not isinstance(index.tokenizer, str) or not isinstance(index.fingerprint, str):
        raise ValueError("tokenizer and fingerprint must be text")
    for part in index.parts:
        if not isinstance(part.name, str) or Path(part.name).name != part.name:
            raise ValueError(f"a part is called {part.name!r}, which is no file's name")
        for count in (part.documents, part.tokens):
            if type(count) is not int or count < 0:
                raise ValueError(f"{part.name} has {count!r} documents or tokens")


class MappedTokens:
    """Documents of tokens that can be fetched by index, without reading any other."""

    def __init__(self, folder: Path, index: TokenizedIndex, vocab_size: int | None = None) -> None:
        """``vocab_size``: what ids must be below; each document is held against it when it is read."""
        self._vocab_size = vocab_size
        self._files = [folder / part.name for part in index.parts if part.documents]
        self._parts = [
            (_mapped(folder / f"{part.name}.bin", index.dtype), _mapped(folder / f"{part.name}.idx", ENDS.str))
            for part in index.parts
            if part.documents
        ]
        self._upto = list(accumulate(part.documents for part in index.parts if part.documents))
        for part, (tokens, ends) in zip((one for one in index.parts if one.documents), self._parts, strict=True):
            if ends[-1] != len(tokens) or ends[0] < 0:
                where = str(folder / f"{part.name}.idx")
                why = f"its last document ends at token {ends[-1]:,}, and the data has {len(tokens):,}"
                raise UserError.one(where, f"{why}: the index does not match its data", "tokenize it again")

    def __len__(self) -> int:
        return self._upto[-1] if self._upto else 0

    def text(self, index: int) -> NDArray[Any]:
        """The tokens of document ``index``, with the marks of its begin and end.

        Raises:
            CorruptRecord: an id of it is none of the vocabulary's.
            UserError: the index of documents is damaged there.
        """
        number = bisect_right(self._upto, index)
        tokens, ends = self._parts[number]
        place = index - (self._upto[number - 1] if number else 0)
        begin, end = (int(ends[place - 1]) if place else 0), int(ends[place])
        if not 0 <= begin <= end <= len(tokens):
            raise UserError.one(
                f"{self._files[number]}.idx",
                f"document {place} begins at token {begin:,} and ends at {end:,} of {len(tokens):,}: the index is damaged",
                "copy the whole folder again, or tokenize it again",
            )
        document = tokens[begin:end]
        if self._vocab_size is not None:
            try:
                token_ids(document, self._vocab_size)
            except ValueError as error:
                where = f"{self._files[number]}.bin, document {place}"
                raise CorruptRecord(where, f"{error}: damaged", "copy the file again, or tokenize it again") from None
        return document


def open_tokenized(context: DatasetContext[None]) -> DocumentSource:
    """The folder that ``training.dataset_path`` names.

    Raises:
        UserError: it is none, it is damaged, empty, or was made with another tokenizer.
    """
    problems = check_tokenized(context)
    if problems:
        raise UserError(*problems)
    folder = Path(context.path or "").expanduser()
    index = read_index(folder)
    files = [folder / (part.name + ending) for part in index.parts for ending in (".bin", ".idx")]
    return ShuffledDocuments(MappedTokens(folder, index, context.vocab_size), context.seed, files)


def check_tokenized(context: DatasetContext[None]) -> list[Problem]:
    """Whether the folder is whole, and made with the job's tokenizer."""
    if not context.path:
        return [Problem(context.where, "dataset 'tokenized' needs its folder", "set training.dataset_path")]
    try:
        index = read_index(Path(context.path).expanduser())
    except UserError as error:
        return list(error.problems)
    if not any(part.documents for part in index.parts):
        return [Problem(context.where, "the dataset is empty", "tokenize one with documents in it")]
    if context.tokenizer and context.tokenizer != index.fingerprint:
        why = f"it was tokenised by {index.tokenizer!r}, which gives other ids than this job's tokenizer"
        return [Problem(context.where, why, "set model.tokenizer and tokenizer_path to that one, or tokenize it again")]
    return []


def _mapped(file: Path, dtype: str) -> NDArray[Any]:
    with file.open("rb") as stream:
        return numpy.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype)
