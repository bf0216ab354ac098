"""Dataset ``megatron``: the indexed datasets of Megatron-LM, pairs of a ``.bin`` and an ``.idx`` file.

The index is little-endian: the bytes ``MMIDIDX\\0\\0``, the version (uint64, 1), the code of the token type (uint8), the
number of sequences and the number of document bounds (uint64 each), the length of each sequence in tokens (int32), its first
byte in the ``.bin`` file (int64), and the bounds of the documents as numbers of sequences (int64). Datasets of images add a
mode (int8) for each sequence.

Source: ``megatron.core.datasets.indexed_dataset`` (megatron-core 0.16).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import DatasetContext, DocumentSource, Problem, UserError
from titan_data.foreign.documents import (
    UNRECORDED,
    MappedFiles,
    check_documents,
    describe_amount,
    needed_path,
    open_documents,
)
from titan_data.storage import files_below, kind_of, located, matching

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER: Final = struct.Struct("<9sQBQQ")
DTYPES: Final = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of token ids, by code. Codes 6 and 7 are floats."""
_LEGACY = b"TNTIDX\x00\x00"
_COPY = "copy both files again, or make them again"


@dataclass(frozen=True)
class Pair:
    """One pair of files, whose index has been checked against the sizes of both."""

    prefix: str
    dtype: str
    sequences: int
    bounds: int
    """Number of document bounds in the index."""
    tokens: int

    @property
    def documents(self) -> int:
        """Number of documents. Without document bounds, each sequence is one."""
        return self.bounds - 1 if self.bounds > 1 else self.sequences

    @cached_property
    def data(self) -> Path:
        """The file of token ids."""
        return located(f"{self.prefix}.bin", self.prefix)

    @cached_property
    def index(self) -> Path:
        """The file of lengths and bounds."""
        return located(f"{self.prefix}.idx", self.prefix)


class MegatronDocuments:
    """The documents of some pairs of files."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = [pair for pair in pairs if pair.documents]
        self._upto = list(accumulate(pair.documents for pair in self._pairs))
        self._maps = MappedFiles()

    @property
    def files(self) -> Sequence[Path]:
        """See :class:`~titan_data.foreign.documents.Layout`."""
        return [file for pair in self._pairs for file in (pair.data, pair.index)]

    def __len__(self) -> int:
        return self._upto[-1] if self._upto else 0

    def read(self, index: int) -> tuple[NDArray[Any], str]:
        """See :class:`~titan_data.foreign.documents.Layout`."""
        number = bisect_right(self._upto, index)
        pair = self._pairs[number]
        document = index - (self._upto[number] - pair.documents)
        first, last = self._sequences_of(pair, document)
        lengths = self._maps.index(pair.index, "<i4", HEADER.size)[first:last]
        starts = self._maps.index(pair.index, "<i8", HEADER.size + 4 * pair.sequences)[first:last]
        tokens, item = self._maps.array(pair.data, pair.dtype), numpy.dtype(pair.dtype).itemsize
        ends = starts + lengths * numpy.int64(item)
        if not (0 <= first <= last <= pair.sequences) or (
            len(lengths)
            and ((lengths < 0).any() or (starts < 0).any() or (ends > tokens.nbytes).any() or (starts % item).any())
        ):
            raise UserError.one(str(pair.index), f"damaged at document {document}: it lies outside of the data", _COPY)
        place = f"{pair.data}, document {document}"
        if not len(lengths):
            return numpy.empty(0, pair.dtype), place
        if numpy.array_equal(starts[1:], ends[:-1]):  # as Megatron writes them: no copy
            return tokens[int(starts[0]) // item : int(ends[-1]) // item], place
        return numpy.concatenate([tokens[a // item : b // item] for a, b in zip(starts, ends, strict=True)]), place

    def _sequences_of(self, pair: Pair, document: int) -> tuple[int, int]:
        if pair.bounds <= 1:
            return document, document + 1
        bounds = self._maps.index(pair.index, "<i8", HEADER.size + 12 * pair.sequences)
        return int(bounds[document]), int(bounds[document + 1])

    def describe(self) -> list[str]:
        """See :class:`~titan_data.foreign.documents.Layout`."""
        dtypes = [pair.dtype for pair in self._pairs]
        return [describe_amount(len(self), sum(pair.tokens for pair in self._pairs), dtypes), UNRECORDED]


def open_megatron(context: DatasetContext[None]) -> DocumentSource:
    """Open the files at ``training.dataset_path``.

    Raises:
        UserError: they are missing, damaged, empty, or of another version or kind.
    """
    return open_documents(context, layout(context))


def check_megatron(context: DatasetContext[None]) -> list[Problem]:
    """Check the headers, the sizes of the files, and the ids of some documents."""
    return check_documents(context, layout)


def describe_megatron(context: DatasetContext[None]) -> list[str]:
    """Return the number of documents and tokens."""
    return layout(context).describe()


def layout(context: DatasetContext[None]) -> MegatronDocuments:
    """Return the documents at the dataset's path: a path without its ending, a glob of these, or a folder.

    Raises:
        UserError: there is no such file, or one is damaged, or of another version or kind.
    """
    return MegatronDocuments([read_pair(prefix) for prefix in _prefixes(context)])


def _prefixes(context: DatasetContext[None]) -> list[str]:
    path = needed_path(context, "the path to its files, without their ending .bin or .idx")
    kind = kind_of(path)
    if kind == "folder":
        found = [str(file) for file in files_below(path) if file.suffix == ".idx"]
        why = "the folder contains no .idx file"
    else:
        stem = str(path).removesuffix(".bin").removesuffix(".idx")
        named = located(f"{stem}.idx", context.where)
        found = [str(named)] if kind_of(named) == "file" else [str(file) for file in matching(named)]
        why = f"there is no file {stem}.idx"
    if not found:
        fix = "set training.dataset_path to the path of the two files without .bin or .idx, or to their folder"
        raise UserError.one(context.where, why, fix, missing=kind is None)
    return sorted(name.removesuffix(".idx") for name in found)


def read_pair(prefix: str) -> Pair:
    """Read the header of an index, and check the sizes of both files against it.

    Raises:
        UserError: the files are damaged, or of another version or kind.
    """
    index, data = (located(f"{prefix}.{ending}", prefix) for ending in ("idx", "bin"))
    where = str(index)
    if kind_of(data) != "file":
        raise UserError.one(str(data), "is missing beside its index", _COPY)
    with index.open("rb") as stream:
        head = stream.read(HEADER.size)
        if head.startswith(_LEGACY):
            why = "is an index of the older TNTIDX format, which Megatron-LM no longer writes"
            raise UserError.one(where, why, "preprocess the data again with a current Megatron-LM")
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise UserError.one(where, "is not an index of Megatron-LM", "name another file, or make it again")
        _, version, code, sequences, bounds = HEADER.unpack(head)
        if version != VERSION:
            raise UserError.one(
                where, f"has version {version}, but this titan-data reads version {VERSION}", "make it again"
            )
        if code not in DTYPES:
            kind = "floats" if code in (6, 7) else "unknown"
            why = f"the type of its tokens has code {code} ({kind}), not {', '.join(map(str, DTYPES))}"
            raise UserError.one(where, why, "make the data again with token ids of an integer type")
        size = index.stat().st_size
        expected = HEADER.size + 12 * sequences + 8 * bounds
        if sequences and size == expected + sequences:
            why = "has a mode for each sequence: the dataset is multimodal, and only text can be trained on"
            raise UserError.one(where, why, "make a dataset of its text")
        if size != expected:
            why = f"has {size:,} bytes, but {sequences:,} sequences and {bounds:,} document bounds take {expected:,}"
            raise UserError.one(where, why, _COPY)
        dtype, end = DTYPES[code], 0
        if sequences:
            stream.seek(HEADER.size + 4 * (sequences - 1))
            (length,) = struct.unpack("<i", stream.read(4))
            stream.seek(HEADER.size + 12 * sequences - 8)
            (start,) = struct.unpack("<q", stream.read(8))
            end = start + length * numpy.dtype(dtype).itemsize
    actual = data.stat().st_size
    if actual != end:
        raise UserError.one(str(data), f"has {actual:,} bytes, but the index ends at byte {end:,}", _COPY)
    return Pair(prefix, dtype, sequences, bounds, actual // numpy.dtype(dtype).itemsize)
