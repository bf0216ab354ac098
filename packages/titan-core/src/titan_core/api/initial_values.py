"""How a parameter gets its first value: descriptions only, free of torch.

A value is a function of (seed, fully qualified name, global element index), so that it is the same on any mesh:
:mod:`titan_core.model.random_values` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """Every element is ``value``."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0 and standard deviation ``std``."""

    std: float


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal with mean 0 and standard deviation ``std`` before truncation to ``limit`` standard deviations."""

    std: float
    limit: float = 3.0


@dataclass(frozen=True)
class Uniform:
    """Uniform over ``[low, high)``."""

    low: float
    high: float


InitialValue = Constant | Normal | TruncatedNormal | Uniform
