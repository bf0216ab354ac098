"""Dataset ``mds``: the shards of MosaicML's streaming library. Compressed ones are read through a decompressed copy.

``index.json`` lists the shards, with the names, encodings and sizes of their columns. A shard is little-endian: the number
of samples and the first byte of each sample and of the end (uint32 each), the columns once more as JSON, and the samples. A
sample has the size of each column whose size varies (uint32), and then the values of all columns.

Source: ``streaming.base.format.mds`` (mosaicml-streaming 0.10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from titan_core.api import DatasetContext, UserError
from titan_core.toolkit.files import LONGEST_TABLE
from titan_core.toolkit.plain_json import read_object
from titan_data.compressed import COMPRESSED, copy_of
from titan_data.foreign.config import MdsSection
from titan_data.foreign.documents import Format, TokenFile, describe_amount, shown
from titan_data.mapped_files import MappedFiles

INDEX, VERSION = "index.json", 2
_NAMES: Final = ("tokens", "input_ids", "token_ids")
_INTEGERS: Final = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_CODES: Final = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}
"""Types of integers, by the code in a value whose encoding names no type."""
_COPY = "copy the folder again, or write it again"


@dataclass(frozen=True)
class TokenColumn:
    """The column with the token ids."""

    number: int
    sizes: tuple[int | None, ...]
    """Size of each column of the shard in bytes; ``None``: it differs from sample to sample."""
    dtype: str | None
    """Type of the ids; ``None``: each value names its own."""
    shape: bool
    """Whether each value begins with its shape."""


@dataclass(frozen=True)
class MdsShard(TokenFile):
    """A file, as the index lists it. Each sample is a document."""

    listed: Path
    """The file in the folder: ``path``, or what is decompressed to it."""
    column: TokenColumn
    unread: Sequence[str]
    """Names of the columns that are not read."""
    mark = ", sample "

    @property
    def packed(self) -> Path | None:
        """See :class:`~titan_data.foreign.documents.TokenFile`."""
        return self.listed if self.listed != self.path else None

    def ranges(self, maps: MappedFiles, first: int, last: int) -> list[tuple[int, int]]:
        """See :class:`~titan_data.foreign.documents.TokenFile`."""
        content = maps.array(self.path, "|u1")
        bounds = content[4 * (1 + first) : 4 * (2 + last)]
        begin, end = (int.from_bytes(bounds[at : at + 4].tobytes(), "little") for at in (0, 4 * (last - first)))
        if not 4 * (2 + self.documents) <= begin <= end <= len(content):
            where, which = f"{self.listed}, sample {first}", "it" if last == first + 1 else shown(first, last)
            why = f"damaged: {which} lies at bytes {begin:,} to {end:,} of {len(content):,}"
            raise UserError.one(where, why, _COPY)
        return [(begin, end)]

    def read(self, maps: MappedFiles, document: int) -> tuple[NDArray[Any], str]:
        """See :class:`~titan_data.foreign.documents.TokenFile`."""
        ((begin, end),) = self.ranges(maps, document, document + 1)
        place = f"{self.listed}, sample {document}"
        try:
            return _value(maps.array(self.path, "|u1")[begin:end], self.column), place
        except (ValueError, IndexError) as error:
            raise UserError.one(place, f"damaged: {error}", _COPY) from None


def _describe(shards: Sequence[MdsShard]) -> list[str]:
    unread = sorted({name for shard in shards for name in shard.unread})
    return [*describe_amount(shards), *([f"columns that are not read: {', '.join(unread)}"] if unread else [])]


def _value(sample: NDArray[Any], column: TokenColumn) -> NDArray[Any]:
    """Return the token ids in a sample.

    Raises:
        ValueError: the sample is damaged, or does not contain token ids.
    """
    varying = sum(size is None for size in column.sizes)
    varied = iter(numpy.frombuffer(sample, "<u4", varying).tolist())
    sizes = [next(varied) if size is None else size for size in column.sizes]
    first = 4 * varying + sum(sizes[: column.number])
    if first + sizes[column.number] > len(sample):
        raise ValueError("its columns are longer than the sample")
    value, at, dtype = sample[first : first + sizes[column.number]], 0, column.dtype
    if dtype is None:
        if (code := int(value[0])) not in _CODES:
            raise ValueError(f"its values have the type with code {code}, which is not one of integers")
        dtype, at = _CODES[code], 1
    if column.shape:
        dimensions, width = int(value[at]) >> 2, 1 << (int(value[at]) % 4)
        if dimensions != 1:
            raise ValueError(f"its array has {dimensions} dimensions, and token ids have one")
        at += 1 + width
    item = numpy.dtype(dtype).itemsize
    if (len(value) - at) % item:
        raise ValueError(f"its {len(value) - at} bytes are not a multiple of {dtype}")
    return numpy.frombuffer(value, numpy.dtype(dtype).newbyteorder("<"), (len(value) - at) // item, at)


def _shards(context: DatasetContext[MdsSection], folder: Path) -> list[MdsShard]:
    """Return the shards in a folder with an ``index.json``."""
    folder = folder.parent if folder.name == INDEX else folder
    index = folder / INDEX
    if not index.is_file():
        below = [str(one.parent.relative_to(folder)) for one in sorted(folder.glob(f"*/{INDEX}"))] if folder.is_dir() else []
        fix = f"name one of its folders: {', '.join(below)}" if below else f"name the folder that contains {INDEX}"
        raise UserError.one(context.where, f"the folder contains no {INDEX}", fix, missing=not folder.exists())
    contents = read_object(index, _COPY, longest=LONGEST_TABLE)
    where = str(index)
    if contents.get("version") != VERSION or not isinstance(contents.get("shards"), list):
        why = f"has version {contents.get('version')!r}, but this titan-data reads version {VERSION}"
        raise UserError.one(where, why, "write the dataset with a current mosaicml-streaming")
    shards: list[MdsShard] = []
    for number, entry in enumerate(contents["shards"]):
        try:
            shards.append(_shard(folder, entry, context, f"{where}: shard {number}"))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError.one(f"{where}: shard {number}", f"damaged: {type(error).__name__} {error}", _COPY) from None
    return shards


def _shard(folder: Path, entry: Mapping[str, Any], context: DatasetContext[MdsSection], where: str) -> MdsShard:
    """
    Raises:
        UserError: the shard cannot be read.
        KeyError, TypeError, AttributeError, ValueError: the entry is damaged.
    """
    if entry["format"] != "mds":
        raise UserError.one(where, f"has format {entry['format']!r}, not 'mds'", "convert it, or train on the JSON itself")
    if entry["version"] != VERSION:
        why = f"has version {entry['version']!r}, but this titan-data reads version {VERSION}"
        raise UserError.one(where, why, "write the dataset with a current mosaicml-streaming")
    samples = int(entry["samples"])
    if samples < 0:
        raise ValueError(f"samples is {samples}")
    file, size = _listed(folder, entry["raw_data"], where)
    listed = file
    if not file.is_file():
        if not (compression := entry.get("compression")):
            raise UserError.one(str(file), f"is missing, although {INDEX} lists it", _COPY)
        listed, size = _listed(folder, entry["zip_data"], where)
        if listed.suffix not in COMPRESSED:
            why = f"is compressed ({compression}), which titan-data does not read"
            raise UserError.one(where, why, "write the dataset with zstd, gz or bz2, or decompress its shards beside them")
        if not listed.is_file():
            raise UserError.one(str(listed), f"is missing, although {INDEX} lists it", _COPY)
        file = copy_of(listed)
    if (actual := listed.stat().st_size) != size or (listed == file and samples and size < 4 * (samples + 2)):
        why = f"has {actual:,} bytes, but {INDEX} says {size:,} and {samples:,} samples"
        raise UserError.one(str(listed), why, _COPY)
    column, others = _column(entry, context, where)
    return MdsShard(file, samples, None, column.dtype, listed, column, others)


def _listed(folder: Path, about: Mapping[str, Any], where: str) -> tuple[Path, int]:
    """Return the file of an entry, and its size.

    Raises:
        UserError: it is not in the folder.
        KeyError, TypeError, ValueError: the entry is damaged.
    """
    name = about["basename"]
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise UserError.one(where, f"names the file {name!r}, which is not in the folder", _COPY)
    return folder / name, int(about["bytes"])


def _column(entry: Mapping[str, Any], context: DatasetContext[MdsSection], where: str) -> tuple[TokenColumn, Sequence[str]]:
    names, encodings = [str(name) for name in entry["column_names"]], [str(one) for one in entry["column_encodings"]]
    sizes = tuple(None if size is None else int(size) for size in entry["column_sizes"])
    if not len(names) == len(encodings) == len(sizes):
        raise ValueError("its columns have other numbers of names, encodings and sizes")
    shown = ", ".join(f"{name} ({encoding})" for name, encoding in zip(names, encodings, strict=True))
    section = context.section
    if section.column:
        if section.column not in names:
            why, fix = f"has no column {section.column!r} (columns: {shown})", "set mds.column to one of them"
            raise UserError.one(where, why, fix)
        chosen = names.index(section.column)
    else:
        arrays = [number for number, one in enumerate(encodings) if _is_array(one)]
        named = [number for number, one in enumerate(names) if one in _NAMES]
        candidates = named if len(named) == 1 else arrays
        if len(candidates) != 1:
            why = f"has {'no column' if not candidates else 'several columns'} that may be token ids (columns: {shown})"
            raise UserError.one(where, why, "set mds.column to the column with the token ids")
        chosen = candidates[0]
    encoding, dtype, shape = encodings[chosen], None, False
    if _is_array(encoding):
        dtype = encoding.split(":")[1] if ":" in encoding else None
        shape = encoding.count(":") < 2
    elif encoding == "bytes":
        if section.dtype == "auto":
            why = f"column {names[chosen]!r} has plain bytes, which do not record the type of the ids"
            raise UserError.one(where, why, 'set mds.dtype to it, such as "int64" (what llm-foundry writes)')
        dtype = section.dtype
    else:
        why = f"column {names[chosen]!r} is encoded as {encoding!r}, and not as an array of integers (columns: {shown})"
        fix = "set mds.column to the column with token ids; text is read from JSON lines or Parquet"
        raise UserError.one(where, why, fix)
    return TokenColumn(chosen, sizes, dtype, shape), [name for name in names if name != names[chosen]]


def _is_array(encoding: str) -> bool:
    kind, _, rest = encoding.partition(":")
    return kind == "ndarray" and (not rest or rest.split(":")[0] in _INTEGERS)


FORMAT: Final = Format(f"the folder with its {INDEX}", _shards, _describe)
