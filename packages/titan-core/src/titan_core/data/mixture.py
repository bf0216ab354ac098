"""Selection of a dataset for each sequence of a run, as a function of the sequence's number alone."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

_BITS = 64
_GOLDEN = 0x9E3779B97F4A7C15
"""``2 ** 64`` divided by the golden ratio. Its multiples are spread evenly over a circle (a Weyl sequence)."""


class Mixture:
    """Datasets by weight. In any range of successive sequences the share of a dataset equals its weight, up to a few
    sequences. Nothing is drawn at random, so short runs and single batches are well mixed too."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """``weights`` need not sum to 1."""
        total = sum(weights)
        self._bounds = [int(upto / total * 2**_BITS) for upto in accumulate(weights)][:-1]
        digest = hashlib.sha256(f"mixture:{seed}".encode()).digest()
        self._offset = int.from_bytes(digest[:8], "little")

    def dataset_of(self, sequence: int) -> int:
        """Return the number of the dataset for sequence ``sequence`` of the run, counted over all ranks."""
        point = (sequence * _GOLDEN + self._offset) % 2**_BITS
        return bisect_right(self._bounds, point)
