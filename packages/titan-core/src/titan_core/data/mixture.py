"""Which dataset each sequence of a run comes from. A function of the sequence's number alone."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

_BITS = 64
_GOLDEN = 0x9E3779B97F4A7C15
"""``2 ** 64`` divided by the golden ratio: multiples of it are spread over a circle as evenly as any (Weyl's sequence)."""


class Mixture:
    """Datasets by weight. The share of each dataset in any run of successive sequences is its weight, up to a few sequences:
    nothing is drawn at random, so short runs and single batches are mixed well too."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """``weights`` need not sum to 1."""
        total = sum(weights)
        self._bounds = [int(upto / total * 2**_BITS) for upto in accumulate(weights)][:-1]
        digest = hashlib.sha256(f"mixture:{seed}".encode()).digest()
        self._offset = int.from_bytes(digest[:8], "little")

    def dataset_of(self, sequence: int) -> int:
        """The dataset of the ``sequence``-th sequence of the run, counted over all ranks."""
        point = (sequence * _GOLDEN + self._offset) % 2**_BITS
        return bisect_right(self._bounds, point)
