"""How the elements of a parameter are arranged in the tensors of another format (:class:`~titan_core.api.ForeignTensor`),
both ways: reading a part of a parameter from its tensors, and writing a tensor from its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from titan_ckpt.foreign.files import Box, ForeignFiles
from titan_core.api import ForeignTensor, UserError

_GAP = 16
"""Number of unneeded rows that are read along, because that is faster than reading twice."""


def by_name(tensors: Iterable[ForeignTensor]) -> dict[str, list[ForeignTensor]]:
    """Return the tensors of the other format, each with the parameters that are in it."""
    found: dict[str, list[ForeignTensor]] = {}
    for tensor in tensors:
        for name in tensor.names:
            found.setdefault(name, []).append(tensor)
    return found


def their_shapes(tensor: ForeignTensor, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a parameter with this ``shape``, by name.

    Raises:
        UserError: the plugin's declaration does not fit the shape.
    """
    if not shape:
        return {tensor.name: ()}
    rows, *sides = _flat(tensor, shape)
    found = {}
    for name, count in _pieces(tensor, rows):
        if tensor.rows:
            if count % len(tensor.rows):
                raise _misfit(tensor, shape)
            count = count // len(tensor.rows) * tensor.block
        theirs = [count, *sides]
        if tensor.transpose:
            if len(theirs) < 2:
                raise _misfit(tensor, shape)
            theirs[-2:] = reversed(theirs[-2:])
        found[name] = tuple(theirs)
    return found


def shape_in(files: ForeignFiles, tensor: ForeignTensor) -> tuple[int, ...]:
    """Return the shape of the parameter that is in ``files``. Of a stack, the first two dimensions are one."""
    rows, sides = 0, tuple[int, ...]()
    for name in tensor.names:
        shape = files.shape(name, tensor.split)
        if not shape:
            return ()
        if tensor.transpose:
            shape = (*shape[:-2], *reversed(shape[-2:]))
        rows += shape[0] // tensor.block * len(tensor.rows) if tensor.rows else shape[0]
        sides = shape[1:]
    return (rows, *sides)


def read(
    files: ForeignFiles,
    tensor: ForeignTensor,
    shape: Sequence[int],
    offsets: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Read a part of the parameter of this ``shape``: by default all of it. Reads hardly more than its bytes."""
    offsets, lengths = offsets or [0] * len(shape), shape if lengths is None else lengths
    if not shape:
        return files.read(tensor.name, ())
    if 0 in lengths:
        return torch.empty(tuple(lengths), dtype=getattr(torch, files.dtype(tensor.names[0])))
    flat = _flat(tensor, shape)
    stacked = len(shape) - len(flat)
    sides = tuple(
        slice(first, first + size) for first, size in zip(offsets[stacked + 1 :], lengths[stacked + 1 :], strict=True)
    )
    starts = [offsets[0]]
    if stacked:
        starts = [outer * shape[1] + offsets[1] for outer in range(offsets[0], offsets[0] + lengths[0])]
    parts = [_rows(files, tensor, flat[0], start, start + lengths[stacked], sides) for start in starts]
    return _joined(parts).reshape(tuple(lengths))


def write(name: str, sources: Sequence[ForeignTensor], whole: Callable[[str], Tensor]) -> Tensor:
    """Return the tensor ``name`` of the other format.

    Args:
        sources: the parameters that are in it (:func:`by_name`).
        whole: returns the parameter of a name.
    """
    found: Tensor | None = None
    for tensor in sources:
        parameter = whole(tensor.parameter)
        if not parameter.dim():
            return parameter
        flat, first = parameter.reshape(_flat(tensor, parameter.shape)), 0
        for piece, count in _pieces(tensor, flat.shape[0]):
            if piece == name:
                part = flat[first : first + count]
            first += count
        if tensor.rows:
            blocks = part.unflatten(0, (-1, len(tensor.rows)))
            if found is None:
                found = blocks.new_empty((blocks.shape[0], tensor.block, *blocks.shape[2:]))
            found[:, list(tensor.rows)] = blocks
        else:
            found = part
    assert found is not None
    if tensor.rows:
        found = found.flatten(0, 1)
    return found.transpose(-1, -2) if tensor.transpose else found


def _flat(tensor: ForeignTensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``shape`` with its first two dimensions as one, if the pieces are a stack."""
    rows = sum(count for _, count in tensor.pieces)
    if not tensor.pieces or rows == shape[0]:
        return tuple(shape)
    if len(shape) < 2 or rows != shape[0] * shape[1]:
        raise _misfit(tensor, shape)
    return (rows, *shape[2:])


def _pieces(tensor: ForeignTensor, rows: int) -> Sequence[tuple[str, int]]:
    return tensor.pieces or ((tensor.name, rows),)


def _misfit(tensor: ForeignTensor, shape: Sequence[int]) -> UserError:
    why = f"the plugin declares pieces, rows or a transpose that a parameter of shape {list(shape)} cannot have"
    return UserError.one(f"{tensor.name} ({tensor.parameter})", why, "fix the plugin")


def _rows(files: ForeignFiles, tensor: ForeignTensor, rows: int, start: int, stop: int, sides: Box) -> Tensor:
    """Read rows ``start`` to ``stop`` of the parameter, which has ``rows``."""
    parts, first = [], 0
    for name, count in _pieces(tensor, rows):
        begin, end = max(start - first, 0), min(stop - first, count)
        if begin < end:
            parts.append(_rows_of_one(files, name, tensor, begin, end, sides))
        first += count
    return _joined(parts)


def _rows_of_one(files: ForeignFiles, name: str, tensor: ForeignTensor, begin: int, end: int, sides: Box) -> Tensor:
    if not tensor.rows:
        return _box(files, name, tensor, begin, end, sides)
    ours, selected = torch.arange(begin, end), torch.tensor(tensor.rows)
    theirs, order = (ours // len(selected) * tensor.block + selected[ours % len(selected)]).sort()
    found = _joined([
        _box(files, name, tensor, int(run[0]), int(run[-1]) + 1, sides)[run - run[0]] for run in _runs(theirs)
    ])  # fmt: skip
    return found[order.argsort()]


def _runs(rows: Tensor) -> Iterator[Tensor]:
    """Divide sorted ``rows`` where many are missing between two."""
    cuts = (rows.diff() > _GAP).nonzero().flatten() + 1
    yield from rows.tensor_split(cuts)


def _box(files: ForeignFiles, name: str, tensor: ForeignTensor, begin: int, end: int, sides: Box) -> Tensor:
    """Read rows ``begin`` to ``end`` of one tensor, which may be stored transposed."""
    box = [slice(begin, end), *sides]
    if tensor.transpose:
        box[-2:] = reversed(box[-2:])
    part = files.read(name, tuple(box), tensor.split)
    return part.transpose(-1, -2) if tensor.transpose else part


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
