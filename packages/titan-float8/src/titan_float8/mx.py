"""Linear layers in MXFP8, based on ``torchao`` (OCP Microscaling Formats 1.0; Rouhani et al., arXiv 2310.10537; recipes for
training: Mishra et al., arXiv 2506.08027)."""

from __future__ import annotations

import logging

import torch
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
from titan_float8.layers import linear_layers, record_flops, require_matches, require_some

try:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm

    from titan_float8.grouped_mx import BLOCK, MXGroupedLinear
except ValueError as error:  # torchao 0.18 on a GPU with triton 3.9: github.com/pytorch/ao, pull request 4880
    reason = f"its MX kernels cannot be imported ({error})"
    raise UserError.one("package torchao", reason, "install torchao above 0.18, or triton below 3.9") from None

log = logging.getLogger(__name__)

_E4M3 = torch.float8_e4m3fn

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
