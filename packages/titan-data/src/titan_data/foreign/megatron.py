"""Dataset ``megatron``: the indexed datasets of Megatron-LM, pairs of a ``.bin`` and an ``.idx`` file.

The index is little-endian: the bytes ``MMIDIDX\\0\\0``, the version (uint64, 1), the code of the token type (uint8), the
number of sequences and the number of document bounds (uint64 each), the length of each sequence in tokens (int32), its first
byte in the ``.bin`` file (int64), and the bounds of the documents as numbers of sequences (int64). Datasets of images add a
mode (int8) for each sequence.

Source: ``megatron.core.datasets.indexed_dataset`` (megatron-core 0.16).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy

from titan_core.api import DatasetContext, UserError
from titan_core.toolkit.files import open_file
from titan_data.foreign.documents import Format, TokenFile, found_files, shown
from titan_data.mapped_files import MappedFiles
from titan_data.storage import kind_of, located

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER: Final = struct.Struct("<9sQBQQ")
DTYPES: Final = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of token ids, by code. Codes 6 and 7 are floats."""
_LEGACY = b"TNTIDX\x00\x00"
_COPY = "copy both files again, or make them again"


@dataclass(frozen=True)
class Pair(TokenFile):
    """A pair of files, whose index has been checked against the sizes of both."""

    index: Path
    """The file of lengths and bounds."""
    sequences: int
    bounds: int
    """Number of document bounds in the index. Without them, each sequence is a document."""

    @property
    def files(self) -> Sequence[Path]:
        """See :class:`~titan_data.foreign.documents.TokenFile`."""
        return [self.path, self.index]

    def ranges(self, maps: MappedFiles, first: int, last: int) -> list[tuple[int, int]]:
        """See :class:`~titan_data.foreign.documents.TokenFile`. Sequences that follow one another, as Megatron writes them,
        are one range."""
        begin, end = first, last
        if self.bounds > 1:
            bounds = maps.index(self.index, "<i8", HEADER.size + 12 * self.sequences)
            begin, end = int(bounds[first]), int(bounds[last])
        lengths = maps.index(self.index, "<i4", HEADER.size)[begin:end]
        starts = maps.index(self.index, "<i8", HEADER.size + 4 * self.sequences)[begin:end]
        item = numpy.dtype(self.dtype).itemsize
        ends = starts + lengths * numpy.int64(item)
        if not 0 <= begin <= end <= self.sequences or bool(
            ((lengths < 0) | (starts < 0) | (ends > self.size) | (starts % item != 0)).any()
        ):
            why = f"damaged at {shown(first, last)}: it lies outside of the data"
            raise UserError.one(str(self.index), why, _COPY)
        apart = numpy.flatnonzero(starts[1:] != ends[:-1])
        return [*zip(starts[[0, *apart + 1]].tolist(), ends[[*apart, -1]].tolist(), strict=True)] if len(starts) else []

    @property
    def size(self) -> int:
        """Bytes of the token ids."""
        assert self.tokens is not None
        return self.tokens * numpy.dtype(self.dtype).itemsize


def _pairs(context: DatasetContext[Any], path: Path) -> list[Pair]:
    """Return the pairs that a path without its ending, a glob of these, or a folder names."""
    if kind_of(path) != "folder":
        stem = str(path).removesuffix(".bin").removesuffix(".idx")
        path = located(f"{stem}.idx", context.where)
    fix = "set training.dataset_path to the path of the two files without .bin or .idx, or to their folder"
    return [read_pair(str(index).removesuffix(".idx")) for index in found_files(context, path, [".idx"], fix)]


def read_pair(prefix: str) -> Pair:
    """Read the header of an index, and check the sizes of both files against it.

    Raises:
        UserError: the files are damaged, or of another version or kind.
    """
    index, data = (located(f"{prefix}.{ending}", prefix) for ending in ("idx", "bin"))
    where = str(index)
    if kind_of(data) != "file":
        raise UserError.one(str(data), "is missing beside its index", _COPY)
    with open_file(index) as stream:
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
    documents = bounds - 1 if bounds > 1 else sequences
    return Pair(data, documents, actual // numpy.dtype(dtype).itemsize, dtype, index, sequences, bounds)


FORMAT: Final = Format("the path to its files, without their ending .bin or .idx", _pairs)
