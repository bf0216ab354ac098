"""Products of experts in low precision: what the formats share.

Shape suffixes in comments: R rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from titan_nn.experts import GroupedLinear, grouped_weight_gradient, mask_rows


class LowPrecisionGroupedLinear(GroupedLinear):
    """Computes the product and the gradient of the rows in a format, and the gradient of the weight in high precision.

    No scale depends on the other rows, or on the other experts, so a row's result is the same wherever it is computed.

    Args:
        emulate: whether to multiply the format's numbers in the dtype of the rows, on any device.
    """

    format: ClassVar[str]
    """Its name in messages."""
    multiple: ClassVar[int]
    """Number of which the sides of a weight must be multiples, on each rank."""

    def __init__(self, emulate: bool) -> None:
        super().__init__()
        self.emulate = emulate

    def forward(self, rows: Tensor, weight: Tensor, counts: Tensor, *, masked: bool = True) -> Tensor:
        """See :func:`titan_nn.experts.grouped_linear`."""
        if masked:
            rows = mask_rows(rows, counts)
        result: Tensor = _Product.apply(rows, weight, counts, self.multiply, self.emulate)
        return mask_rows(result, counts) if masked else result

    @staticmethod
    def multiply(rows: Tensor, weight: Tensor, counts: Tensor, emulate: bool) -> Tensor:
        """Return ``rows[r] @ weight[expert of r].T``; of rows of no expert, anything."""
        raise NotImplementedError  # abstract: each format multiplies in its own way


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, multiply: Callable[..., Tensor], emulate: bool
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.multiply, ctx.emulate = multiply, emulate
        return multiply(rows, weight, counts, emulate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, counts = ctx.saved_tensors
        to_rows = ctx.multiply(gradient, weight.mT, counts, ctx.emulate) if ctx.needs_input_grad[0] else None
        to_weight = grouped_weight_gradient(gradient, rows, counts) if ctx.needs_input_grad[1] else None
        return to_rows, to_weight, None, None, None


class FilledRows:
    """Where rows belong if each expert's are filled up to a multiple, as kernels need them. The host does not wait.

    Args:
        counts: number of rows of each expert, int64 ``[experts]``.
        rows: number of rows, sorted by expert; those after ``counts.sum()`` belong to no expert.
        multiple: to which each expert's rows are filled up.
    """

    places: Tensor
    """The place of each row, int64 ``[rows]``, with rows of no expert after all others."""
    ends: Tensor
    """The end of each expert's places, int32 ``[experts]``."""
    size: int
    """Number of places, a multiple: as many as there can be, and not all are used."""

    def __init__(self, counts: Tensor, rows: int, multiple: int) -> None:
        filled = (counts + multiple - 1) // multiple * multiple
        ends, places_end = counts.cumsum(0), filled.cumsum(0)
        shifts = torch.cat((places_end - filled - ends + counts, places_end[-1:] - ends[-1:]))  # E + 1
        index = torch.arange(rows, device=counts.device)  # R
        self.places = index + shifts[torch.searchsorted(ends, index, right=True)]
        self.ends = places_end.to(torch.int32)
        self.size = -(-(rows + (multiple - 1) * counts.shape[0]) // multiple) * multiple

    def fill(self, tensor: Tensor) -> Tensor:
        """Return the rows of ``tensor`` at their places, with zeros elsewhere."""
        zeros = torch.zeros(self.size, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
        return zeros.index_copy(0, self.places, tensor)
