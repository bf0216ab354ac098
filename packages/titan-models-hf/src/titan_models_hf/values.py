"""Initial values that are computed by element (:class:`titan_core.api.Computed`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_core.api import Elements


def by_index(elements: Elements, numbers: Sequence[float]) -> Tensor:
    """Return the number at the index of each element of a vector."""
    return torch.tensor(numbers, device=elements.index[0].device)[elements.index[0]]


def log_uniform(elements: Elements, low: float, high: float) -> Tensor:
    """Return logarithms of numbers that are uniform between ``low`` and ``high``: decays of a recurrence."""
    return (low + (high - low) * elements.uniform()).log()
