"""What is kept of a tensor: enough for its mean, size and extremes, and to be added up over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Moments:
    """Sums over elements. Where several ranks hold the same elements, each of them counts; mean and root mean square do not
    change by that, so they are the same on any mesh."""

    count: int
    sum: float
    """Of the elements; NaN where one is."""
    square_sum: float
    """Of their squares."""
    abs_max: float
    """The largest absolute value."""
    not_finite: int
    """Elements that are NaN or infinite."""

    @property
    def mean(self) -> float:
        """NaN where there are no elements."""
        return self.sum / self.count if self.count else math.nan

    @property
    def rms(self) -> float:
        """Root mean square."""
        return math.sqrt(self.square_sum / self.count) if self.count else math.nan

    @classmethod
    def total(cls, several: Iterable[Moments]) -> Moments:
        """Of all together."""
        ones = list(several)
        abs_max = max((one.abs_max for one in ones if not math.isnan(one.abs_max)), default=math.nan)
        return cls(
            sum(one.count for one in ones),
            math.fsum(one.sum for one in ones) if all(math.isfinite(one.sum) for one in ones) else math.nan,
            math.fsum(one.square_sum for one in ones) if all(math.isfinite(one.square_sum) for one in ones) else math.nan,
            abs_max,
            sum(one.not_finite for one in ones),
        )
