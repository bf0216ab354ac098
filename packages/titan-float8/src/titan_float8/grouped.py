"""Products of experts in float8, with one scale per row: as the recipe "rowwise_with_gw_hp" computes linear layers, but for
the gradient of the input each input feature of an expert's weight has a scale, not the weight.

Shape suffixes in comments: R rows, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from titan_core.api import GroupedLinear, grouped_linear, mask_rows
from titan_core.toolkit.models import grouped_weight_gradient

MULTIPLE = 16
"""Number of which the sides of a weight, and the kernel's rows of each expert, must be multiples."""
_E4M3 = torch.float8_e4m3fn


class Float8GroupedLinear(GroupedLinear):
    """Computes the product and the gradient of the rows in float8, and the gradient of the weight in high precision.

    No scale depends on the other rows, or on the other experts, so a row's result is the same wherever it is computed.

    Args:
        emulate: whether to multiply the float8 numbers in the dtype of the rows, on any device.
    """

    def __init__(self, emulate: bool) -> None:
        super().__init__()
        self.emulate = emulate

    def forward(self, rows: Tensor, weight: Tensor, counts: Tensor, *, masked: bool = True) -> Tensor:
        """See :func:`titan_core.api.grouped_linear`."""
        if masked:
            rows = mask_rows(rows, counts)
        result: Tensor = _Product.apply(rows, weight, counts, self.emulate)
        return mask_rows(result, counts) if masked else result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, emulate: bool) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.emulate = emulate
        return _product(rows, weight, counts, emulate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, counts = ctx.saved_tensors
        to_rows = _product(gradient, weight.mT, counts, ctx.emulate) if ctx.needs_input_grad[0] else None
        to_weight = grouped_weight_gradient(gradient, rows, counts) if ctx.needs_input_grad[1] else None
        return to_rows, to_weight, None, None


def _product(rows: Tensor, weight: Tensor, counts: Tensor, emulate: bool) -> Tensor:
    """Return ``rows[r] @ weight[expert of r].T``; of rows of no expert, anything."""
    (low_rows, row_scales), (low_weight, weight_scales) = _cast(rows), _cast(weight)
    if emulate:  # powers of two: division rounds nothing
        exact_rows, exact_weight = low_rows.float() / row_scales, low_weight.float() / weight_scales
        return grouped_linear(exact_rows.to(rows.dtype), exact_weight.to(rows.dtype), counts, masked=False)
    places, ends = padded_places(counts, rows.shape[0])
    size = rows.shape[0] + (MULTIPLE - 1) * counts.shape[0]
    # Bytes: not all operators have float8 types. The byte 0 is the number 0.
    padded = torch.zeros(size, rows.shape[1], dtype=torch.uint8, device=rows.device)
    padded = padded.index_copy(0, places, low_rows.contiguous().view(torch.uint8)).view(_E4M3)
    scales = torch.ones(size, device=rows.device).index_copy(0, places, row_scales.squeeze(-1).reciprocal())
    result = F.scaled_grouped_mm(  # type: ignore[attr-defined]  # not in torch's stubs
        padded,
        low_weight.contiguous().mT,
        scales,
        F.ScalingType.RowWise,
        weight_scales.squeeze(-1).reciprocal(),
        F.ScalingType.RowWise,
        offs=ends,
        output_dtype=torch.bfloat16,  # the only one that the kernel has
    )
    return result[places].to(rows.dtype)


def _cast(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``tensor`` in float8, and the fp32 scales by which its rows (along the last dimension) were multiplied."""
    scales = tensor_to_scale(
        tensor,
        _E4M3,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )
    return to_fp8_saturated(tensor.float() * scales, _E4M3), scales


def padded_places(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return where rows belong if each expert's are filled up to a multiple of 16. The host does not wait.

    Args:
        counts: number of rows of each expert, int64 ``[experts]``.
        rows: number of rows, sorted by expert; those after ``counts.sum()`` belong to no expert.

    Returns:
        The place of each row, int64 ``[rows]``, with rows of no expert after all others; and the end of each expert's
        places, int32 ``[experts]``.
    """
    filled = (counts + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    ends, places_end = counts.cumsum(0), filled.cumsum(0)
    shifts = torch.cat((places_end - filled - ends + counts, places_end[-1:] - ends[-1:]))  # E + 1
    index = torch.arange(rows, device=counts.device)  # R
    return index + shifts[torch.searchsorted(ends, index, right=True)], places_end.to(torch.int32)
