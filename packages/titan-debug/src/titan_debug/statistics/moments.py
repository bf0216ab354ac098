"""The statistics recorded for a tensor. They add up over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Moments:
    """Sums over a tensor's elements. Elements replicated on several ranks count several times. That does not change the mean
    and the root mean square, so these are the same on any mesh."""

    count: int
    sum: float
    """Sum of the elements; NaN if an element is NaN."""
    square_sum: float
    """Sum of their squares."""
    abs_max: float
    """The largest absolute value."""
    not_finite: int
    """Number of elements that are NaN or infinite."""

    @property
    def mean(self) -> float:
        """Mean; NaN without elements."""
        return self.sum / self.count if self.count else math.nan

    @property
    def rms(self) -> float:
        """Root mean square; NaN without elements."""
        return math.sqrt(self.square_sum / self.count) if self.count else math.nan

    @classmethod
    def total(cls, several: Iterable[Moments]) -> Moments:
        """Return the moments of all tensors together."""
        parts = list(several)
        sums, square_sums = [part.sum for part in parts], [part.square_sum for part in parts]
        return cls(
            sum(part.count for part in parts),
            math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan,
            math.fsum(square_sums) if all(map(math.isfinite, square_sums)) else math.nan,
            max((part.abs_max for part in parts if not math.isnan(part.abs_max)), default=math.nan),
            sum(part.not_finite for part in parts),
        )
