"""Linear layers and products of experts in MXFP8, based on ``torchao`` (OCP Microscaling Formats 1.0; Rouhani et al., arXiv
2310.10537; recipes for training: Mishra et al., arXiv 2506.08027).

torchao has products of experts too (``torchao.prototype.moe_training``). Those here do not emulate fp32 in bf16, do not
synchronise the device when emulated, and allow rows that belong to no expert.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice as Rows,
    MXFP8Dim1CastKernelChoice as Columns,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from titan_core.api import ModelPart, TrainingContext, UserError
from titan_float8.config import MXSection
from titan_float8.experts import convert_experts, experts_of, record_flops_of_experts
from titan_float8.grouped import FilledRows, LowPrecisionGroupedLinear
from titan_float8.layers import linear_layers, record_flops, require_matches, require_some
from titan_nn.experts import grouped_linear

try:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.prototype.mx_formats.utils import to_blocked
except ValueError as error:  # torchao 0.18 on a GPU with triton 3.9: github.com/pytorch/ao, pull request 4880
    reason = f"its MX kernels cannot be imported ({error})"
    raise UserError.one("package torchao", reason, "install torchao above 0.18, or triton below 3.9") from None

log = logging.getLogger(__name__)

BLOCK = 32
"""Number of elements that share a scale."""
ROWS = 128
"""The kernel's blocks of scales have so many rows, and start anew with each expert."""
_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

KERNELS = {
    True: (KernelPreference.EMULATED, Rows.TORCH, Columns.TORCH),
    False: (KernelPreference.AUTO, Rows.TRITON, Columns.CUDA),
}
"""Emulated or not -> kernels for matmuls, for scaling along rows, and for scaling along columns."""


def apply(part: ModelPart, context: TrainingContext[MXSection]) -> ModelPart:
    """Convert the linear layers of ``part`` to MXFP8. Names and weights do not change."""
    section = context.section
    degree = context.job.mesh.degree("tp")
    # Tensor parallelism shards one dimension of a weight, and must not cut through a block.
    layers = dict(linear_layers(part, section.filter_fqns, section.convert_head, BLOCK * degree))
    experts = convert_experts(part, section, section.filter_fqns, MXGroupedLinear, degree)
    require_some({*layers, *experts}, part, "mx")
    require_matches(part, section.filter_fqns, "mx", experts_of(part) if section.convert_experts else ())
    for name, layer in layers.items():
        part.module.set_submodule(name, MXLinear.from_linear(layer, section))
    if not section.emulate:
        share = 2 / 3 if section.recipe_name.endswith("wgrad_with_hp") else 1.0
        record_flops(part, layers, share)
        record_flops_of_experts(part, experts, share)
    found = f"{len(layers)} linear layers" + (f", {len(experts)} modules of experts" if experts else "")
    log.info("MXFP8 (%s%s): %s", section.recipe_name, ", emulated" if section.emulate else "", found)
    return part


class MXLinear(nn.Linear):
    """A linear layer that computes its three matmuls, forward and backward, in MXFP8.

    Under tensor parallelism, its weight is this rank's shard. No block of features crosses ranks, so scales are the same.
    """

    emulate: bool
    scaling: ScaleCalculationMode
    weight_gradient_in_high_precision: bool

    @classmethod
    def from_linear(cls, layer: nn.Linear, section: MXSection) -> MXLinear:
        """Return a layer that shares the parameters of ``layer``."""
        with torch.device("meta"):
            converted = cls(layer.in_features, layer.out_features, bias=False)
        converted.weight, converted.bias = layer.weight, layer.bias
        converted.emulate = section.emulate
        converted.scaling = (
            ScaleCalculationMode.FLOOR if section.recipe_name == "mxfp8_floor" else ScaleCalculationMode.RCEIL
        )
        converted.weight_gradient_in_high_precision = section.recipe_name.endswith("wgrad_with_hp")
        return converted

    def forward(self, input: Tensor) -> Tensor:
        """Compute what :class:`torch.nn.Linear` does."""
        output = self._matmul(input, self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _matmul(self, input: Tensor, weight: Tensor) -> Tensor:
        kernels, rows, columns = KERNELS[self.emulate]
        output: Tensor = mx_mm.apply(
            input,
            weight,
            _E4M3,
            _E4M3,
            _E4M3,
            BLOCK,
            kernels,
            rows,
            columns,
            self.scaling,
            self.weight_gradient_in_high_precision,
        )
        return output


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
