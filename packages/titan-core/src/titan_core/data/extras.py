"""Extra tensors of a batch that datasets fill: checks of a document's values, and the arrays of a step. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from titan_core.api import ExtraField
from titan_core.data.window import Window


def checked_extras(values: Mapping[str, Any], fields: Mapping[str, ExtraField], tokens: int) -> Mapping[str, NDArray[Any]]:
    """Return the extra ``values`` of a document with ``tokens`` tokens in the types of ``fields``.

    Raises:
        ValueError: they are not those that the dataset declares.
    """
    if unknown := sorted(values.keys() - fields.keys()):
        raise ValueError(f"its extra values {', '.join(unknown)} are not among those that the dataset declares")
    found: dict[str, NDArray[Any]] = {}
    for name, extra in fields.items():
        if name not in values:
            if extra.fill is None:
                raise ValueError(f"it gives no values for the extra tensor {name!r}, which has no fill value")
            continue
        value = numpy.asarray(values[name])
        shape = (tokens, *extra.shape) if extra.sequence else extra.shape
        if value.shape != shape:
            raise ValueError(f"its extra values {name!r} have shape {value.shape}, and not {shape}")
        if not numpy.can_cast(value.dtype, extra.dtype, "same_kind"):
            raise ValueError(f"its extra values {name!r} are {value.dtype}, and not {extra.dtype}")
        cast = value.astype(extra.dtype)
        if cast.dtype.kind in "iu" and not numpy.array_equal(cast, value):
            raise ValueError(f"its extra values {name!r} do not fit {extra.dtype}")
        if cast.dtype.kind == "f" and not numpy.isfinite(cast).all():
            raise ValueError(f"its extra values {name!r} must be finite")
        found[name] = cast
    return found


def rows_of(extra: ExtraField, name: str, windows: Sequence[Window], length: int) -> NDArray[Any]:
    """Return tensor ``name`` in rows of ``length`` tokens, ``[rows, length, *shape]`` or ``[rows, *shape]``."""
    shape = (len(windows), length) if extra.sequence else (len(windows),)
    rows = numpy.full((*shape, *extra.shape), extra.fill or 0, extra.dtype)
    for number, window in enumerate(windows):
        first = 0
        for piece, values in zip(window.pieces, window.extras, strict=True):
            if name in values and extra.sequence:
                rows[number, first : first + len(piece)] = values[name]
            elif name in values:
                rows[number] = values[name]
            first += len(piece)
    return rows
