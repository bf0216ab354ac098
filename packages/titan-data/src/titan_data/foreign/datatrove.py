"""Dataset ``datatrove``: the tokenised files of datatrove, which nanotron trains on.

``NAME.ds`` has the token ids of all documents in a row (uint16 or uint32), and ``NAME.ds.index`` the number of tokens up to
the end of each document (uint64). ``NAME.ds.loss``, if it exists, says of each token whether it is trained on (one byte),
and ``NAME.ds.metadata`` names the tokenizer. All numbers are little-endian.

Source: ``datatrove.pipeline.tokens.tokenizer`` (datatrove 0.9).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from titan_core.api import DatasetContext, DocumentSource, Problem, UserError, WeightedTokens
from titan_core.toolkit.text import shorten
from titan_data.foreign.documents import (
    UNRECORDED,
    MappedFiles,
    check_documents,
    describe_amount,
    needed_path,
    open_documents,
)
from titan_data.storage import beside, files_below, kind_of, matching

ENDING = ".ds"
DTYPES = {2: "<u2", 4: "<u4"}
ENDS = "<u8"
_COPY = "copy all of its files again, or tokenise again"


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids with its index, whose sizes have been checked."""

    data: Path
    documents: int
    tokens: int
    dtype: str
    weighted: bool
    """Whether there is a file of losses."""
    tokenizer: str
    """What its metadata says; empty without metadata."""

    @property
    def index(self) -> Path:
        """The file of document ends."""
        return beside(self.data, ".index")

    @property
    def loss(self) -> Path:
        """The file that says which tokens are trained on."""
        return beside(self.data, ".loss")


class DatatroveDocuments:
    """The documents of some files."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self._files = [file for file in files if file.documents]
        self._upto = list(accumulate(file.documents for file in self._files))
        self._maps = MappedFiles()

    @property
    def files(self) -> Sequence[Path]:
        """See :class:`~titan_data.foreign.documents.Layout`."""
        return [path for one in self._files for path in (one.data, one.index, *([one.loss] if one.weighted else []))]

    def __len__(self) -> int:
        return self._upto[-1] if self._upto else 0

    def read(self, index: int) -> tuple[NDArray[Any] | WeightedTokens, str]:
        """See :class:`~titan_data.foreign.documents.Layout`."""
        number = bisect_right(self._upto, index)
        file = self._files[number]
        document = index - (self._upto[number] - file.documents)
        ends = self._maps.index(file.index, ENDS)
        first, last = int(ends[document - 1]) if document else 0, int(ends[document])
        if not first <= last <= file.tokens:
            why = f"document {document} begins at token {first:,} and ends at {last:,} of {file.tokens:,}: damaged"
            raise UserError.one(str(file.index), why, _COPY)
        ids, place = self._maps.array(file.data, file.dtype)[first:last], f"{file.data}, document {document}"
        if not file.weighted:
            return ids, place
        return WeightedTokens(ids, (self._maps.array(file.loss, "|u1")[first:last] != 0).astype(numpy.float32)), place

    def describe(self) -> list[str]:
        """See :class:`~titan_data.foreign.documents.Layout`."""
        tokens = sum(file.tokens for file in self._files)
        lines = [describe_amount(len(self), tokens, [file.dtype for file in self._files]), UNRECORDED]
        if named := sorted({file.tokenizer for file in self._files} - {""}):
            lines.append(f"their metadata names the tokenizer {', '.join(map(shorten, named))}, which is not compared")
        if any(file.weighted for file in self._files):
            lines.append("some tokens have no loss, as their .loss files say")
        return lines


def open_datatrove(context: DatasetContext[None]) -> DocumentSource:
    """Open the files at ``training.dataset_path``.

    Raises:
        UserError: they are missing, damaged or empty, or have no index.
    """
    return open_documents(context, layout(context))


def check_datatrove(context: DatasetContext[None]) -> list[Problem]:
    """Check the sizes of the files, and the ids of some documents."""
    return check_documents(context, layout)


def describe_datatrove(context: DatasetContext[None]) -> list[str]:
    """Return the number of documents and tokens, and the tokenizer that the metadata names."""
    return layout(context).describe()


def layout(context: DatasetContext[None]) -> DatatroveDocuments:
    """Return the documents at the dataset's path: a ``.ds`` file, a glob, or a folder.

    Raises:
        UserError: there is no such file, or one is damaged or has no index.
    """
    path = needed_path(context, f"the path to its {ENDING} files")
    kind = kind_of(path)
    if kind == "folder":
        found = [file for file in files_below(path) if file.name.endswith(ENDING)]
    else:
        found = [path] if kind == "file" else matching(path)
    found = [file for file in found if file.suffix == ENDING]
    if not found:
        why = f"there is no {ENDING} file"
        raise UserError.one(context.where, why, f"name a {ENDING} file, a glob, or a folder", missing=kind is None)
    return DatatroveDocuments([_token_file(file) for file in sorted(found)])


def _token_file(data: Path) -> TokenFile:
    """
    Raises:
        UserError: the index is missing, or the sizes of the files do not match.
    """
    index, loss, metadata = (beside(data, f".{ending}") for ending in ("index", "loss", "metadata"))
    if not index.is_file():
        why = "has no .index file beside it, so the ends of its documents are unknown"
        fix = 'copy it too, or read the file as training.dataset = "flat_tokens", with the token that ends a document'
        raise UserError.one(str(data), why, fix)
    size, of_index = data.stat().st_size, index.stat().st_size
    if of_index % 8:
        raise UserError.one(str(index), f"has {of_index:,} bytes, which are no whole number of document ends", _COPY)
    tokens = 0
    if of_index:
        with index.open("rb") as stream:
            stream.seek(-8, 2)
            tokens = int.from_bytes(stream.read(8), "little")
    item = next((one for one in DTYPES if tokens * one == size), None)
    if item is None:
        why = f"has {size:,} bytes, but its index ends at token {tokens:,}, of 2 or 4 bytes"
        raise UserError.one(str(data), why, _COPY)
    weighted = loss.is_file()
    if weighted and loss.stat().st_size != tokens:
        raise UserError.one(str(loss), f"has {loss.stat().st_size:,} bytes, but there are {tokens:,} tokens", _COPY)
    name = metadata.read_text(encoding="utf-8", errors="replace").partition("\n")[0] if metadata.is_file() else ""
    return TokenFile(data, of_index // 8, tokens, DTYPES[item], weighted, name.rpartition("|")[0])
