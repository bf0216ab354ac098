"""The headers of the pages of a Parquet file, which say how much memory a page takes before it is decompressed.

The library trusts them: a page of a kilobyte may claim two gigabytes, and a run of equal values any number of them. A header
is a struct of Thrift's compact protocol.

Sources: ``parquet.thrift`` (https://github.com/apache/parquet-format), ``thrift-compact-protocol.md`` (Apache Thrift).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pyarrow

DELTA_BYTE_ARRAY: Final = 7
"""Encoding of texts that begin as the text before them, which may be much longer than the page."""
IN_DICTIONARY: Final = (2, 8)
"""Encodings of values that are numbers of the dictionary's entries."""
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_DETAILS: Final = {_DATA: (5, 2), _DICTIONARY: (7, 2), _DATA_V2: (8, 4)}
"""Of each kind of page: the field with its details, and the field in these with the encoding."""
_HEADERS: Final = (1 << 10, 1 << 14, 1 << 24)
"""Bytes in which a header is looked for; the library reads at most 16 MiB."""
_DEEPEST: Final = 16
_CODECS: Final = ("UNCOMPRESSED", "SNAPPY", "GZIP", "BROTLI", "ZSTD")
"""Those whose name says how a page is decompressed. "LZ4" is the name of two."""
_LARGE_DICTIONARY: Final = 8 << 20
"""Bytes. Writers stop at one mebibyte, unless their user asks for more."""


class Page(NamedTuple):
    """A page, according to its header."""

    is_dictionary: bool
    unpacked: int
    """Bytes once it is decompressed."""
    values: int
    encoding: int
    bounds: tuple[int, int]
    """First byte in the file, after the header, and the byte after the last."""


def pages(content: Any, begin: int, end: int) -> Iterator[Page]:
    """Yield the pages of a column chunk.

    Raises:
        pyarrow.ArrowInvalid: a header is damaged.
    """
    while begin < end:
        fields, size = _header(content, begin, end)
        kind, unpacked, packed = (fields.get(number, -1) for number in (1, 2, 3))
        if unpacked < 0 or packed < 0:
            raise pyarrow.ArrowInvalid(f"the header of the page at byte {begin} is damaged")
        begin += size + packed
        if kind in _DETAILS:
            field, encoding = _DETAILS[kind]
            details = fields.get(field, {})
            values = max(details.get(1, 0), 0)
            yield Page(kind == _DICTIONARY, unpacked, values, details.get(encoding, 0), (begin - packed, begin))


def longest_text(content: Any, page: Page, compression: str) -> int:
    """Return a number of bytes that no text of a dictionary exceeds: those of the longest, unless the page is large or
    compressed by an unknown codec.

    Args:
        compression: as the metadata of the column chunk names it.

    Raises:
        pyarrow.ArrowException, OSError: the page is damaged.
    """
    if page.unpacked > _LARGE_DICTIONARY or compression not in _CODECS:
        return page.unpacked
    texts = content[page.bounds[0] : page.bounds[1]]
    if compression != "UNCOMPRESSED":
        texts = pyarrow.decompress(bytes(texts), page.unpacked, compression.lower(), asbytes=True)
    longest = at = 0
    for _ in range(page.values):  # each after its length, in four bytes
        length = int.from_bytes(texts[at : at + 4], "little")
        longest, at = max(longest, length), at + 4 + length
        if at >= len(texts):  # the library says what is wrong, if anything is
            break
    return longest


def _header(content: Any, begin: int, end: int) -> tuple[dict[int, Any], int]:
    """Return the fields of the header at byte ``begin``, and its size."""
    for size in _HEADERS:
        try:
            return _struct(content[begin : min(begin + size, end)], 0)
        except IndexError:
            continue
    raise pyarrow.ArrowInvalid(f"there is no whole header of a page at byte {begin}")


def _struct(content: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Return the numbers and structs in a struct, by field, and the byte after it."""
    fields: dict[int, Any] = {}
    number = 0
    while (head := content[at]) != 0:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _zigzag(content, at)
        fields[number], at = _value(content, at, head & 15, depth)
    return fields, at + 1


def _value(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true, false
        return kind == 1, at
    if kind == 3:
        return content[at], at + 1
    if kind in (4, 5, 6):
        return _zigzag(content, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = _varint(content, at)
        return None, at + length
    if kind == 12 and depth < _DEEPEST:
        return _struct(content, at, depth + 1)
    raise pyarrow.ArrowInvalid("the header of a page contains what no header contains")


def _varint(content: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = content[at]
        found |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return found, at
        if shift > 63:
            raise pyarrow.ArrowInvalid("the header of a page contains a number that is too long")


def _zigzag(content: bytes, at: int) -> tuple[int, int]:
    found, at = _varint(content, at)
    return (found >> 1) ^ -(found & 1), at
