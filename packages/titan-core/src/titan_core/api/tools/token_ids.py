"""What token ids must be before they enter a batch: an id beyond the embedding's rows ends a run without a word on where it
came from (and on a GPU breaks the device's context)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray


def token_ids(tokens: Sequence[int] | NDArray[Any], vocab_size: int) -> NDArray[Any]:
    """A document's ids as an array of whole numbers, each from 0 to ``vocab_size - 1``.

    Raises:
        ValueError: they are something else; with the first id that is.
    """
    ids = numpy.asarray(tokens)
    if ids.size == 0:
        return numpy.empty(0, numpy.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"it is an array {list(ids.shape)} of {ids.dtype}, not a list of token ids")
    if ids.max() >= vocab_size or ids.min() < 0:
        place = int(numpy.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
        raise ValueError(f"token {place} has the id {ids[place]}, and the vocabulary ends at {vocab_size - 1}")
    return ids
