"""Estimates the size of a table's row as Python's values. In Arrow, a thousand values may be one, and a million
empty ones nothing."""

from __future__ import annotations

from typing import Any

import numpy
import pyarrow
import pyarrow.compute
from pyarrow import types

_EACH = 8
"""Bytes of a value whose own size is less."""
_TEXTS = frozenset(of.id for of in (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary()))


def largest_row(table: pyarrow.Table) -> int:
    """Return a number that :func:`row_size` of none of the rows exceeds."""
    if not all(of.id in _TEXTS for of in table.schema.types):
        return row_size(table)
    lengths = (pyarrow.compute.max(pyarrow.compute.binary_length(column)).as_py() for column in table.columns)
    return sum(_EACH + (length or 0) for length in lengths)


def row_size(table: pyarrow.Table) -> int:
    """Return the bytes of texts in a table, and :data:`_EACH` for any other value in it."""
    return sum(_size(chunk) for column in table.columns for chunk in column.chunks)


def _size(array: Any) -> int:
    if isinstance(array, pyarrow.ExtensionArray):
        return _size(array.storage)
    of, count = array.type, len(array)
    if types.is_dictionary(of):
        lengths, indices = _lengths(array.dictionary), array.indices.drop_null()
        if lengths is None:  # of the values, each of which may be repeated
            used = indices.unique().to_pylist()
            return count * (_EACH + max((_size(array.dictionary.slice(at, 1)) for at in used), default=0))
        return _EACH * count + int(lengths[numpy.asarray(indices)].sum())
    if types.is_struct(of):
        return _EACH * count + sum(map(_size, array.flatten()))
    if types.is_map(of):
        offsets = array.offsets.to_pylist()
        begin, end = offsets[0], offsets[-1]
        return _EACH * count + _size(array.keys.slice(begin, end - begin)) + _size(array.items.slice(begin, end - begin))
    if hasattr(array, "flatten"):  # lists of any kind
        return _EACH * count + _size(array.flatten())
    lengths = _lengths(array)
    return _EACH * count + (0 if lengths is None else int(lengths.sum()))


def _lengths(array: Any) -> Any:
    """Return the lengths of texts; ``None`` for other values."""
    of = array.type
    if types.is_string_view(of) or types.is_binary_view(of):
        views = numpy.frombuffer(array.buffers()[1], "<i4")[4 * array.offset :: 4][: len(array)]
        return numpy.where(numpy.asarray(array.is_valid()), views, 0).astype(numpy.int64)
    if types.is_string(of) or types.is_large_string(of) or types.is_binary(of) or types.is_large_binary(of):
        return numpy.asarray(pyarrow.compute.binary_length(array).fill_null(0)).astype(numpy.int64)
    if types.is_fixed_size_binary(of):
        return numpy.full(len(array), of.byte_width, numpy.int64)
    return None
