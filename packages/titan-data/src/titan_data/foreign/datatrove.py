"""Dataset ``datatrove``: the tokenised files of datatrove, which nanotron trains on.

``NAME.ds`` has the token ids of all documents in a row (uint16 or uint32), and ``NAME.ds.index`` the number of tokens up to
the end of each document (uint64). ``NAME.ds.loss``, if it exists, says of each token whether it is trained on (one byte),
and ``NAME.ds.metadata`` names the tokenizer. All numbers are little-endian.

Source: ``datatrove.pipeline.tokens.tokenizer`` (datatrove 0.9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import DatasetContext, UserError, WeightedTokens
from titan_core.toolkit.files import open_file, read_text
from titan_core.toolkit.text import shorten
from titan_data.foreign.documents import Format, TokenFile, describe_amount, found_files, shown
from titan_data.mapped_files import MappedFiles
from titan_data.storage import beside

ENDING = ".ds"
DTYPES = {2: "<u2", 4: "<u4"}
ENDS = "<u8"
_COPY = "copy all of its files again, or tokenise again"
_NAME = f"name a {ENDING} file, a glob, or a folder"


@dataclass(frozen=True)
class IndexedFile(TokenFile):
    """A file of token ids with its index, whose sizes have been checked."""

    weighted: bool
    """Whether there is a file of losses."""
    tokenizer: str
    """What its metadata says; empty without metadata."""

    @property
    def index(self) -> Path:
        """The file of document ends."""
        return beside(self.path, ".index")

    @property
    def loss(self) -> Path:
        """The file that says which tokens are trained on."""
        return beside(self.path, ".loss")

    @property
    def files(self) -> Sequence[Path]:
        """See :class:`~titan_data.foreign.documents.TokenFile`."""
        return [self.path, self.index, *([self.loss] if self.weighted else [])]

    def ranges(self, maps: MappedFiles, first: int, last: int) -> list[tuple[int, int]]:
        """See :class:`~titan_data.foreign.documents.TokenFile`."""
        ends, item = maps.index(self.index, ENDS), numpy.dtype(self.dtype).itemsize
        assert self.tokens is not None
        begin, end = int(ends[first - 1]) if first else 0, int(ends[last - 1])
        if not begin <= end <= self.tokens:
            why = f"{shown(first, last)} begins at token {begin:,} and ends at {end:,} of {self.tokens:,}: damaged"
            raise UserError.one(str(self.index), why, _COPY)
        return [(begin * item, end * item)]

    def extents(self, maps: MappedFiles, first: int, last: int) -> list[tuple[Path, int, int]]:
        """See :class:`~titan_data.foreign.documents.TokenFile`."""
        found = super().extents(maps, first, last)
        item = numpy.dtype(self.dtype).itemsize
        return found + [(self.loss, begin // item, end // item) for _, begin, end in found if self.weighted]

    def read(self, maps: MappedFiles, document: int) -> tuple[NDArray[Any] | WeightedTokens, str]:
        """See :class:`~titan_data.foreign.documents.TokenFile`."""
        ids, place = super().read(maps, document)
        if not self.weighted or isinstance(ids, WeightedTokens):
            return ids, place
        ((_, begin, end),) = self.extents(maps, document, document + 1)[1:]
        return WeightedTokens(ids, (maps.array(self.loss, "|u1")[begin:end] != 0).astype(numpy.float32)), place


def _describe(files: Sequence[IndexedFile]) -> list[str]:
    lines = describe_amount(files)
    if named := sorted({file.tokenizer for file in files} - {""}):
        lines.append(f"their metadata names the tokenizer {', '.join(map(shorten, named))}, which is not compared")
    if any(file.weighted for file in files):
        lines.append("some tokens have no loss, as their .loss files say")
    return lines


def _find(context: DatasetContext[Any], path: Path) -> list[IndexedFile]:
    """Return the files that a ``.ds`` file, a glob, or a folder names."""
    found = found_files(context, path, [ENDING], _NAME)
    if not (named := [file for file in found if file.suffix == ENDING]):
        raise UserError.one(context.where, f"there is no {ENDING} file", _NAME)
    return [_token_file(file) for file in named]


def _token_file(data: Path) -> IndexedFile:
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
        raise UserError.one(
            str(index), f"its size ({of_index:,} bytes) is not a multiple of 8, the size of a document end", _COPY
        )
    tokens = 0
    if of_index:
        with open_file(index) as stream:
            stream.seek(-8, 2)
            tokens = int.from_bytes(stream.read(8), "little")
    item = next((one for one in DTYPES if tokens * one == size), None)
    if item is None:
        why = f"has {size:,} bytes, but its index ends at token {tokens:,}, of 2 or 4 bytes"
        raise UserError.one(str(data), why, _COPY)
    weighted = loss.is_file()
    if weighted and loss.stat().st_size != tokens:
        raise UserError.one(str(loss), f"has {loss.stat().st_size:,} bytes, but there are {tokens:,} tokens", _COPY)
    name = read_text(metadata, errors="replace").partition("\n")[0] if metadata.is_file() else ""
    return IndexedFile(data, of_index // 8, tokens, DTYPES[item], weighted, name.rpartition("|")[0])


FORMAT: Final = Format(f"the path to its {ENDING} files", _find, _describe)
