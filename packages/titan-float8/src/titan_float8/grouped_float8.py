"""Products of experts in float8, with one scale per row: as the recipe "rowwise_with_gw_hp" computes linear layers, but for
the gradient of the input each input feature of an expert's weight has a scale, not the weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from titan_core.api import grouped_linear
from titan_float8.grouped import FilledRows, LowPrecisionGroupedLinear

_E4M3 = torch.float8_e4m3fn


class Float8GroupedLinear(LowPrecisionGroupedLinear):
    """Scales rows along their features, and weights along the features that the product contracts."""

    format = "float8"
    multiple = 16

    @staticmethod
    def multiply(rows: Tensor, weight: Tensor, counts: Tensor, emulate: bool) -> Tensor:
        """See :meth:`LowPrecisionGroupedLinear.multiply`."""
        (low_rows, row_scales), (low_weight, weight_scales) = _cast(rows), _cast(weight)
        if emulate:  # powers of two: division rounds nothing
            exact_rows, exact_weight = low_rows.float() / row_scales, low_weight.float() / weight_scales
            return grouped_linear(exact_rows.to(rows.dtype), exact_weight.to(rows.dtype), counts, masked=False)
        filled = FilledRows(counts, rows.shape[0], Float8GroupedLinear.multiple)
        result = F.scaled_grouped_mm(  # type: ignore[attr-defined]  # not in torch's stubs
            # Bytes: not all operators have float8 types. The byte 0 is the number 0.
            filled.fill(low_rows.contiguous().view(torch.uint8)).view(_E4M3),
            low_weight.contiguous().mT,
            filled.fill(row_scales.squeeze(-1).reciprocal()),
            F.ScalingType.RowWise,
            weight_scales.squeeze(-1).reciprocal(),
            F.ScalingType.RowWise,
            offs=filled.ends,
            output_dtype=torch.bfloat16,  # the only one that the kernel has
        )
        return result[filled.places].to(rows.dtype)


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
