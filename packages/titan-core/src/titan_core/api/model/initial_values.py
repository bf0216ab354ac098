"""Descriptions of the initial values of parameters. Free of torch.

A value depends only on (seed, fully qualified name, global element index), so it is the same on any mesh;
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
    """Normal distribution with mean 0 and standard deviation ``std``."""

    std: float


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal distribution with mean 0, truncated to ``limit`` standard deviations; ``std`` applies before truncation."""

    std: float
    limit: float = 3.0


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution over ``[low, high)``."""

    low: float
    high: float


InitialValue = Constant | Normal | TruncatedNormal | Uniform
