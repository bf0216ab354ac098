"""Products of experts in MXFP8, based on ``torchao`` (OCP Microscaling Formats 1.0; Rouhani et al., arXiv 2310.10537).

torchao has such products too (``torchao.prototype.moe_training``). Those here do not emulate fp32 in bf16, do not
synchronise the device when emulated, and allow rows that belong to no expert. This file is apart from ``mx.py`` because the
kernels of linear layers cannot be imported with every triton.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_float8.grouped import FilledRows, LowPrecisionGroupedLinear
from titan_float8.torchao_prototypes import ScaleCalculationMode, to_blocked, to_dtype, to_mx
from titan_nn.experts import grouped_linear

BLOCK = 32
"""Number of elements that share a scale."""
ROWS = 128
"""The kernel's blocks of scales have so many rows, and start anew with each expert."""
_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


class MXGroupedLinear(LowPrecisionGroupedLinear):
    """Scales blocks of 32 features: of rows, and of the features of weights that the product contracts, as the recipe
    "mxfp8_rceil_wgrad_with_hp" does in linear layers."""

    format = "MXFP8"
    multiple = BLOCK

    @staticmethod
    def multiply(rows: Tensor, weight: Tensor, counts: Tensor, emulate: bool) -> Tensor:
        """See :meth:`LowPrecisionGroupedLinear.multiply`."""
        (row_scales, low_rows), (weight_scales, low_weight) = _cast(rows), _cast(weight)
        if emulate:  # powers of two: multiplication rounds nothing
            exact_rows = to_dtype(low_rows, row_scales, _E4M3, BLOCK, rows.dtype)
            exact_weight = to_dtype(low_weight, weight_scales, _E4M3, BLOCK, rows.dtype)
            return grouped_linear(exact_rows, exact_weight, counts, masked=False)
        filled = FilledRows(counts, rows.shape[0], ROWS)
        result = F.scaled_grouped_mm(  # type: ignore[attr-defined]  # not in torch's stubs
            # Bytes: not all operators have these types. The byte 0 is the number 0, and as a scale a power of two.
            filled.fill(low_rows.view(torch.uint8)).view(_E4M3),
            low_weight.mT,
            _arrange(filled.fill(row_scales.view(torch.uint8))).view(filled.size, -1),
            F.ScalingType.BlockWise1x32,
            _arrange(_fill_columns(weight_scales.view(torch.uint8))).view(weight.shape[0], -1),
            F.ScalingType.BlockWise1x32,
            swizzle_a=F.SwizzleType.SWIZZLE_32_4_4,
            swizzle_b=F.SwizzleType.SWIZZLE_32_4_4,
            offs=filled.ends,
            output_dtype=torch.bfloat16,  # the only one that the kernel has
        )
        return result[filled.places].to(rows.dtype)


def _cast(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of the blocks of ``tensor`` along its last dimension, powers of two in e8m0, and the blocks in
    e4m3."""
    scales, low = to_mx(tensor.contiguous(), _E4M3, BLOCK, ScaleCalculationMode.RCEIL)
    return scales, low


def _fill_columns(scales: Tensor) -> Tensor:
    """Return the scales of weights, ``[experts, out, blocks]``, as rows, each expert's filled up to a multiple of 128."""
    return F.pad(scales, (0, 0, 0, -scales.shape[1] % ROWS)).flatten(0, 1)


def _arrange(scales: Tensor) -> Tensor:
    """Return the scales of rows, bytes ``[rows, blocks]``, in the order in which the kernel reads them: flat, with 128 rows
    after each other."""
    return to_blocked(scales).view(_E8M0)
